"""`RemoteTensor`: the interface of a program to a tensor on a worker."""

from __future__ import annotations

import copy
from typing import Any

import torch

from allranks import _core
from allranks._base.errors import WorkerLost
from allranks.remote.protocol import arguments
from allranks.remote.torch_device import special as special
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.dispatch import MARKS, dispatch
from allranks.remote.torch_device.exchange import shard
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make, single
from allranks.remote.torch_device.saving import reduce, twin

__all__ = ["RemoteTensor"]

_LOOKS = (torch.Tensor, torch.dtype)
aten = torch.ops.aten


class RemoteTensor(Handle):
    """A tensor whose data is on a worker, or on each worker of a group."""

    # It queues known calls, and passes all others to `dispatch` in `dispatch.py`.
    __torch_dispatch__ = staticmethod(_core.dispatch)  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert the tensor like `torch.Tensor.to`. A transfer to another worker does not pass the master."""
        copy = kwargs.pop("copy", False)
        if len(args) > 1 and type(args[-1]) is bool and len(args) == (3 if isinstance(args[0], _LOOKS) else 4):
            *args, copy = args  # type: ignore[assignment]
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type in ("worker", "lazy"):
            device = place_of(device).device
        if (
            not copy
            and device in (None, self._place.device)
            and dtype in (None, self.dtype)
            and memory_format in (None, torch.preserve_format)
        ):
            return self
        if device not in (None, self._place.device):
            single(self)
        return aten._to_copy.default(  # type: ignore[no-any-return]
            self, dtype=dtype, device=device or self._place.device, non_blocking=non_blocking,
            memory_format=memory_format,
        )  # fmt: skip

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return the tensor's data as a CPU tensor of the master. Waits for it."""
        return self.to("cpu", memory_format=memory_format)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy(force=True)
        raise TypeError(
            f"can't convert {self._place} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError(f"the data is on {self._place}.\n  Use Tensor.cpu() first.")

    __dlpack_device__ = __dlpack__

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return super().type().replace("lazy", "worker")
        return super().type(dtype, non_blocking, **kwargs)

    def data_ptr(self) -> int:
        # NotImplementedError as for meta tensors: it is a RuntimeError, which safetensors expects.
        raise NotImplementedError(
            f"the data is on {self._place}: this process has no pointer to it.\n  Use Tensor.cpu() first."
        )

    const_data_ptr = data_ptr

    def storage(self) -> Any:
        raise NotImplementedError(
            "a tensor on a worker has no storage in this process.\n  Use Tensor.cpu() to read its data."
        )

    def record_stream(self, stream: Any) -> None:
        """Do nothing, because memory is freed in the order of the single queue."""

    def share_memory_(self) -> RemoteTensor:
        raise RuntimeError(
            f"the data is on {self._place}: it cannot be in shared memory of this host.\n  Use Tensor.cpu() first."
        )

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError(f"cannot pin a tensor on {self._place}: only dense CPU tensors can be pinned")

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def shard(self, rank: int) -> RemoteTensor:
        """Return one worker's part of a group's tensor: the same memory, on device ``worker:rank``."""
        return shard(self, rank)  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            with self._place.master.connections.without_recovery():
                return _show(self)
        except WorkerLost as lost:
            why = str(lost).partition("\n")[0]
            return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype}): {why}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce(self)

    def __copy__(self) -> Any:
        made: Any = make(self._place, self._sig, self._ref, self._off)  # shares the memory
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        made.__dict__.update(self._notes())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
                " at the moment."
            )
        made: Any
        # torch copies a parameter without the rest of its storage and without its gradient.
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        else:
            made = twin(self, memo).requires_grad_(self.requires_grad)
            made.grad = copy.deepcopy(self.grad, memo)
            made.__dict__.update(copy.deepcopy(self._notes(), memo))  # torch does not copy these for parameters
        memo[id(self)] = made
        return made


def _show(x: RemoteTensor) -> str:
    """Return the printed form of a handle."""
    if len(x._place.ranks) > 1:
        each = ",\n".join(f"  worker {rank}: {shard(x, rank).detach()!r}" for rank in x._place.ranks)
        return f"group tensor(\n{each})"
    inner = repr(x._place.master.transfers.fetch(x))
    grad = (
        f", grad_fn=<{type(x.grad_fn).__name__}>" if x.grad_fn is not None
        else ", requires_grad=True" if x.requires_grad else ""
    )  # fmt: skip
    text = f"{inner[:-1]}, device='{x.device}'{grad})"
    return f"Parameter containing:\n{text}" if isinstance(x, torch.nn.Parameter) else text


_core.set_handles(
    RemoteTensor, DeviceTarget, torch.Tensor._make_wrapper_subclass, here, dispatch, torch.is_inference_mode_enabled,
    MARKS,
    {type: code for type, code in arguments.KINDS.items() if code in arguments.CODES},
    (arguments.LIST, arguments.INTEGER, arguments.FLOAT), arguments.NUMBERS,
)  # fmt: skip
