"""What a worker does beside torch's operators: hand tensors over, make groups, tell how it is doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from allranks.remote import wire

if TYPE_CHECKING:
    from allranks._group import ProcessGroup
    from allranks.remote.meet import Post
    from allranks.remote.worker import Interpreter

__all__ = ["ORDERS", "Shop"]

SMALL = 1 << 16
"""Up to so many bytes a tensor travels on the line between master and worker, beyond that on the native channel."""


class Shop:
    """What orders work with: the groups of this worker, its clocks."""

    def __init__(self, post: Post | None) -> None:
        self.post = post
        self.groups: dict[str, ProcessGroup] = {}
        self.functions: dict[int, Any] = {}
        self.marks: dict[int, float] = {}


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def sync(worker: Interpreter, data: memoryview) -> list[wire.Fault]:
    """Everything before is done: the faults that nobody has heard of."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    faults, worker.unheard = worker.unheard, []
    return faults


def item(worker: Interpreter, data: memoryview, id: int) -> Any:
    value = worker.take(id).item()
    return [value.real, value.imag] if isinstance(value, complex) else value


def fetch(worker: Interpreter, data: memoryview, id: int, group: str = "") -> Any:
    tensor = worker.take(id)
    meta = wire_meta(tensor)
    if not group:
        return [meta, _bytes(tensor)]
    return [meta, None]


def wire_meta(tensor: torch.Tensor) -> Any:
    return (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), 0)


def seed(worker: Interpreter, data: memoryview, seed: int) -> None:
    torch.manual_seed(seed)


def state(worker: Interpreter, data: memoryview) -> bytes:
    """The random generator's state."""
    return torch.random.get_rng_state().numpy().tobytes() if worker.device.type == "cpu" else (
        torch.cuda.get_rng_state(worker.device).numpy().tobytes()
    )  # fmt: skip


def set_state(worker: Interpreter, data: memoryview, state: bytes) -> None:
    given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    torch.random.set_rng_state(given) if worker.device.type == "cpu" else torch.cuda.set_rng_state(given, worker.device)


def group(worker: Interpreter, data: memoryview, name: str, ranks: Sequence[int], timeout_s: float) -> None:
    """Makes a native group, with which this worker meets others."""
    assert worker.shop.post is not None
    worker.shop.groups[name] = worker.shop.post.make_group(name, ranks, timeout_s)


def ungroup(worker: Interpreter, data: memoryview, name: str) -> None:
    if (made := worker.shop.groups.pop(name, None)) is not None:
        made.close()  # type: ignore[attr-defined]


def mark(worker: Interpreter, data: memoryview, event: int) -> None:
    """Notes the time, for `Event`."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    worker.shop.marks[event] = time.perf_counter()


def marked(worker: Interpreter, data: memoryview, event: int) -> float:
    return worker.shop.marks[event]


def memory(worker: Interpreter, data: memoryview) -> dict[str, int]:
    """Bytes of the tensors that live here, and of the whole process."""
    storages = {
        held.untyped_storage()._cdata: held.untyped_storage().nbytes()
        for held in worker.slots.values()
        if isinstance(held, torch.Tensor)
    }
    with open("/proc/self/statm") as pages:
        resident = int(pages.read().split()[1])
    return {"tensors": len(worker.slots), "allocated": sum(storages.values()), "resident": resident * 4096}


def alias(worker: Interpreter, data: memoryview, id: int, output: int) -> None:
    worker.slots[output] = worker.slots[id]


def kind(worker: Interpreter, data: memoryview) -> str:
    """The kind of device on which tensors live here."""
    return worker.device.type


def forget(worker: Interpreter, data: memoryview, template: int) -> None:
    worker._table.pop(template, None)


ORDERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (sync, item, fetch, seed, state, set_state, group, ungroup, mark, marked, memory, alias, kind, forget)
}
