"""Tensors that share memory on a worker also share it after they are saved, loaded or deep-copied, like CPU tensors.

torch saves a tensor as a view of its storage, which is written once. To load it, torch reads the data into a storage,
requests a storage on the target device, and creates the views. Handles have no storage. `SavedMemory` represents the
storage on the worker, and is fetched when it is written. `Cargo` is a storage of the master that reports the worker's
device until a tensor is created from it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from allranks._base.errors import UsageError
from allranks.remote.protocol.signature import signature
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.dispatch import special
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make, single

__all__ = ["reduce", "register", "twin"]


class SavedMemory(torch.UntypedStorage):
    """The memory of tensors on a worker."""

    whole: Handle  # its bytes

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.whole.device

    def nbytes(self) -> int:
        return self.whole.numel()

    def data_ptr(self) -> int:
        # torch identifies a storage by this number, and refuses views of one storage with different dtypes.
        return int(self._cdata)

    def cpu(self) -> torch.UntypedStorage:
        return self.whole.cpu().untyped_storage()

    def _write_file(self, *args: Any, **kwargs: Any) -> None:
        self.cpu()._write_file(*args, **kwargs)  # type: ignore[no-untyped-call]


# Weak, because a memory must not stay on the worker longer than the tensors that share it.
_memories: weakref.WeakValueDictionary[tuple[DeviceTarget, int], SavedMemory] = weakref.WeakValueDictionary()
"""Memory by the worker's name for it. Each entry holds a tensor on the worker, so the name is not reused."""


def _memory(x: Handle) -> SavedMemory:
    place = x._place
    (ref,) = place.master.connections.outbox.reserve(place.target, 1)
    name, nbytes = place.master.connections.request(place, "storage", id=x._ref.id, outputs=[ref.id])
    found = _memories.get((place, name))
    if found is None:
        found = _memories[place, name] = SavedMemory(0)  # type: ignore[no-untyped-call]
        found.whole = make(place, signature(torch.uint8, [nbytes], [1]), ref)
    return found


def reduce(x: Handle) -> tuple[Any, ...]:
    """Pickle a handle as torch pickles tensors that have a storage.

    Raises:
        UsageError: It is a tensor of a group.
        RemoteError: It is the result of a failed operation.
    """
    if isinstance(x, torch.nn.Parameter):
        hooks: OrderedDict[Any, Any] = OrderedDict()
        parts = (x.detach(), x.requires_grad, hooks)
        if notes := x._notes():
            return torch._utils._rebuild_parameter_with_state, (*parts, notes)
        return torch._utils._rebuild_parameter, parts
    single(x)
    plain: Any = x.detach().resolve_conj().resolve_neg()
    view = (plain._off, tuple(plain.shape), plain.stride())
    memory = _memory(plain)
    new = x.dtype in torch.storage._new_dtypes()  # dtypes without a typed storage class
    typed = torch.storage.TypedStorage(wrap_storage=memory, dtype=torch.uint8 if new else x.dtype, _internal=True)  # type: ignore[no-untyped-call]
    if new:
        return torch._utils._rebuild_tensor_v3, (typed, *view, x.requires_grad, OrderedDict(), x.dtype)
    return torch._utils._rebuild_tensor_v2, (typed, *view, x.requires_grad, OrderedDict())


class _Copying:
    """One call of `copy.deepcopy`. Its memo holds this object, and workers hold the copied memory until it returns."""

    def __init__(self) -> None:
        self.number = next(_copyings)
        self.places: set[DeviceTarget] = set()

    def __del__(self) -> None:
        for place in self.places:
            if not place.master.connections.closed:
                place.master.connections.command(place, "copied", copying=self.number)


_copyings = itertools.count(1)


def twin(x: Handle, memo: dict[Any, Any]) -> Handle:
    """Return a deep copy of a tensor and all its memory.

    Args:
        x: The tensor.
        memo: The memo of `copy.deepcopy`. Copies of tensors that share memory share memory, too.
    """
    place, connections = x._place, x._place.master.connections
    if x._sig.bits:
        return x.detach().clone()  # type: ignore[return-value]
    connections.refuse_recording("the step deep-copies a tensor")
    connections.check(place)
    copying = memo.setdefault("allranks", _Copying())
    copying.places.add(place)
    (ref,) = connections.outbox.reserve(place.target, 1)
    connections.command(place, "twin", copying=copying.number, id=x._ref.id, outputs=[ref.id], line=here(1))
    return make(place, x._sig, ref, x._off)


class Cargo(torch.UntypedStorage):
    """Data on its way to a worker."""

    target: torch.device
    there: Handle | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.target

    def bytes(self) -> torch.Tensor:
        data = torch.UntypedStorage(self.nbytes())  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(data.copy_(self))

    def _set_from_file(self, *args: Any, **kwargs: Any) -> None:
        super()._set_from_file(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.there is not None:  # in torch's old format the data follows the tensors
            self.there.copy_(self.bytes())


def _locate(storage: Any) -> str | None:
    return str(storage.device) if isinstance(storage, SavedMemory) else None


def _deserialize(storage: Any, location: str) -> Any:
    device = torch.device(location) if location.partition(":")[0] == "worker" else None
    if device is None:
        return None
    cargo: Any = Cargo(storage.nbytes())  # type: ignore[no-untyped-call]
    cargo.copy_(storage)
    cargo.target = place_of(device).device
    return cargo


@special(torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage)
def _set(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2 or not isinstance(args[1], Cargo):
        raise RuntimeError(
            "a tensor on a worker has no storage in this process.\n"
            "  Use Tensor.cpu() to read its data, and set_ with a tensor, or copy_, to change its data."
        )
    x, cargo, offset, size, strides = (*args, ())[:5]
    if cargo.there is None:
        place = place_of(cargo.target)
        cargo.there = place.master.transfers.upload(place, cargo.bytes())
    typed = cargo.there if x.dtype is torch.uint8 else cargo.there.view(x.dtype)
    x.data = typed.as_strided(size, strides, offset)
    return x


def register(handle: type[Handle]) -> None:
    """Register the memory of workers with `torch.save`, and ``map_location="worker:1"`` with `torch.load`.

    `torch.jit.load` and multiprocessing cannot handle it, and refuse it.
    """
    # Before torch's own packages, whose priorities start at 10.
    torch.serialization.register_package(9, _locate, _deserialize)
    torch.jit._serialization.validate_map_location = _validated
    ForkingPickler.register(handle, _refuse_to_go)


def _refuse_to_go(x: Handle) -> Any:
    raise UsageError(
        f"a tensor on {x.device} cannot be sent to another process, which has no workers.\n  Send its .cpu() instead."
    )


_validate = torch.jit._serialization.validate_map_location


def _validated(map_location: Any = None) -> Any:
    """Refuse workers. TorchScript sets data without an operator, so no data would reach the worker."""
    device = _validate(map_location)  # type: ignore[no-untyped-call]
    if device is not None and device.type == "worker":
        raise UsageError(
            f"torch.jit.load cannot load to {device}.\n  Call it in a function that mw.remote() runs on the worker,"
            " or load the module's state with torch.load."
        )
    return device
