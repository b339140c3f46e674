"""`torch.Generator(device="worker:1")`: a random number generator on a worker.

torch only creates generators of devices that it supports. To torch's C++, this one is therefore a CPU generator of
which only the address is used. Operations find the worker's generator by this address (`dispatch.GENERATORS`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from allranks._call.bytes import bytes_of
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.dispatch import GENERATORS

__all__ = ["Generator", "register"]

_MASK = (1 << 64) - 1


class Generator(torch.Generator):
    """A generator of a worker, or of each worker of a group. It behaves like `torch.Generator`, with the same numbers.

    Args:
        device: The device of the tensors that it fills.

    Raises:
        UsageError: The worker does not exist.

    Cost:
        Calls are queued, except those that read a state, which wait.

    Example:
        g = torch.Generator(device="worker:1").manual_seed(0)
        x = torch.randn(3, device="worker:1", generator=g)
    """

    def __new__(cls, device: Any = "worker") -> Generator:
        return super().__new__(cls)  # a CPU generator

    def __init__(self, device: Any = "worker") -> None:
        self._place = place_of(torch.device(device))
        self._number = self._place.master.connections.next_number()
        self._place.master.connections.command(self._place, "generator", name=self._number)
        GENERATORS[self._cdata] = self  # type: ignore[attr-defined]

    def __del__(self) -> None:
        place = getattr(self, "_place", None)
        if place is not None and not place.master.connections.closed:
            place.master.connections.command(place, "forget_generator", name=self._number)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._place.device

    def manual_seed(self, seed: int) -> Generator:
        self._place.master.connections.command(self._place, "seed", seed=int(seed), generator=self._number)
        return self

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(8), "little") & _MASK >> 1
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return int(self._place.master.connections.request(self._place, "initial_seed", generator=self._number))

    def get_state(self) -> torch.Tensor:
        state = self._place.master.connections.request(self._place, "state", generator=self._number)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> Generator:
        state = bytes_of(new_state)
        self._place.master.connections.command(self._place, "set_state", state=state, generator=self._number)
        return self

    def clone_state(self) -> Generator:
        return Generator(self.device).set_state(self.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (str(self.device), self.get_state())

    def __repr__(self) -> str:
        return f"Generator(device='{self.device}')"


def _rebuild(device: str, state: torch.Tensor) -> Generator:
    return Generator(device).set_state(state)


def register() -> None:
    """Make `torch.Generator` return these for workers, if it has a Python metaclass, as since torch 2.13.

    In older versions only `torch.worker.Generator` is available.
    """
    meta: Any = type(torch.Generator)
    if meta is type:
        return

    class Meta(meta):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args else None)
            if cls is torch.Generator and device is not None and torch.device(device).type == "worker":
                return Generator(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    # Like `torch.Generator.__class__ = Meta`, which Python refuses for every class that is created in C.
    object.__dict__["__class__"].__set__(torch.Generator, Meta)
