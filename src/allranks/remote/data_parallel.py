"""`torch.nn.DataParallel` on workers: one program, and each worker computes a part of the batch.

Each forward scatters the inputs, copies the module to the other workers, calls the copies and gathers their outputs.
The calls are only queued, so a simple loop runs them in parallel. A copy that waits for a value in its forward
(``.item()``) delays the others. Parameters and buffers travel as one command for each worker, and so do the gradients
on their way back.

The functions are those of torch.nn.parallel. They and the class pass all devices except workers to torch. One result
differs: a parameter that no part of the batch has used has no gradient, as in a module that is not parallel. torch's
DataParallel returns zeros for it.

Source: torch/nn/parallel/{data_parallel,replicate,scatter_gather}.py for the interface and the meaning.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from allranks._base.errors import NotInitializedError, UsageError
from allranks.remote.master.start import master_of_this_process
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]

T = TypeVar("T", bound=nn.Module)
Device = int | str | torch.device


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """Splits each batch among workers.

    The module keeps its parameters on the first worker, where the gradients are added up. It processes parts of the
    batch, so batch normalization uses the statistics of each part. ``state_dict`` has torch's names (``module.``).

    Args:
        module: A module with all parameters and buffers on ``device_ids[0]``.
        device_ids: The workers, ``["worker:1", "worker:2"]``. None: all existing workers. With CUDA devices the object
            behaves like torch's own, and with ``"cpu"`` the module is not changed.
        output_device: The device on which outputs are gathered. None: ``device_ids[0]``. ``"cpu"`` waits for them.
        dim: The dimension along which tensors are split and gathered.

    Raises:
        UsageError: A worker does not exist, or the devices are of different kinds.

    Cost:
        Each forward sends parameters and buffers once to each other worker, and each backward returns the gradients
        once. ``mw.group()`` with ``all_reduce_`` avoids the former.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        workers = _all_workers() if device_ids is None else _workers(device_ids)
        if workers is None and device_ids is not None and {*map(_kind, device_ids)} == {"cpu"}:
            nn.Module.__init__(self)
            self.module, self.device_ids = module, []
        elif workers is None:
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
        else:
            # Not `nn.DataParallel.__init__`, which refuses workers (`torch_device.device`).
            nn.Module.__init__(self)
            self.module, self.dim = module, dim
            self.device_ids: list[Any] = workers
            self.src_device_obj = workers[0]
            self.output_device: Any = _output_device(output_device, workers)
            if len(workers) == 1:  # as torch.nn.DataParallel does
                self.module.to(workers[0])

    # The forward of torch.nn.DataParallel calls these methods.

    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[T]:
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        return _scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Any | None = None,
) -> Any:
    """Call a module once as `DataParallel` does.

    Args:
        module: A module with all parameters and buffers on ``device_ids[0]``.
        inputs: A tuple of arguments, or one argument.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`.
        dim: See `DataParallel`.
        module_kwargs: Further arguments, by name.

    Returns:
        The gathered outputs of the copies of the module.
    """
    if (_all_workers() if device_ids is None else _workers(device_ids)) is None:
        return nn.parallel.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)  # type: ignore[arg-type]
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*inputs, **(module_kwargs or {}))


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """Split the tensors in any nesting of tuples, lists and dicts, and move the parts to devices.

    Args:
        inputs: Nested values. Values that are not tensors go unchanged to all devices.
        target_gpus: The devices.
        dim: The dimension along which to split, as ``torch.chunk`` does. The last part may be smaller, and there may be
            fewer parts than devices.

    Returns:
        The nesting of `inputs`, once for each device that gets a part.
    """
    workers = _workers(target_gpus)
    if workers is None:
        return nn.parallel.scatter_gather.scatter(inputs, target_gpus, dim)  # type: ignore[arg-type]

    def cut(value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor):
            return tuple(part.to(on) for part, on in zip(value.chunk(len(workers), dim), workers, strict=False))
        if isinstance(value, tuple) and value:
            parts = zip(*map(cut, value), strict=False)
            return [type(value)(*part) for part in parts] if hasattr(value, "_fields") else list(parts)
        if isinstance(value, list) and value:
            return [list(part) for part in zip(*map(cut, value), strict=False)]
        if isinstance(value, dict) and value:
            return [type(value)(part) for part in zip(*map(cut, value.items()), strict=False)]
        return [value for _ in workers]

    return cut(inputs)


def _scatter_kwargs(inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[Any], dim: int) -> Any:
    """Scatter positional and named arguments, and pad the shorter list with empty ones."""
    if _workers(devices) is None:
        return nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, devices, dim)
    positional = [*scatter(inputs, devices, dim)] if inputs else []
    named = [*scatter(kwargs, devices, dim)] if kwargs else []
    positional += [()] * (len(named) - len(positional))
    named += [{}] * (len(positional) - len(named))
    return tuple(positional), tuple(named)


def replicate(network: T, devices: Sequence[Device], detach: bool = False) -> list[T]:
    """Copy a module to devices. The gradients of the copies are added up in the module's own parameters.

    The copies have no parameters, but tensors that depend on the module's. The first copy shares its memory with the
    module.

    Args:
        network: A module on ``devices[0]``.
        devices: The devices.
        detach: The copies need no gradients.

    Returns:
        A copy for each device.
    """
    workers = _workers(devices)
    if workers is None:
        return nn.parallel.replicate(network, devices, detach)  # type: ignore[arg-type]
    tensors = [*network.parameters(), *network.buffers()]
    copied = _BroadcastToReplicas.apply(workers, *(each.detach() if detach else each for each in tensors))
    replicas = []
    for number in range(len(workers)):
        copies: dict[Any, Any] = dict(zip(tensors, copied[number * len(tensors) :], strict=False))
        twins = {module: module._replicate_for_data_parallel() for module in network.modules()}  # type: ignore[no-untyped-call]
        for module, twin in twins.items():
            for name, child in module._modules.items():
                twin._modules[name] = None if child is None else twins[child]
            # These tensors are not leaves, so they cannot be parameters. setattr, because RNNs keep their own list of
            # them.
            former = OrderedDict((name, copies.get(each)) for name, each in module._parameters.items())
            for name, copy in former.items():
                setattr(twin, name, copy)
            twin.__dict__["_former_parameters"] = former  # attribute of torch's replicas that other code reads
            # The first copy has the module's own buffers, so that their updates stay in the module.
            if number:
                twin._buffers.update((name, copies.get(each)) for name, each in module._buffers.items())
        replicas.append(twins[network])
    return replicas


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Call each module with its inputs, on its device.

    Args:
        modules: One module for each device.
        inputs: A tuple or list of arguments for each module, or one argument.
        kwargs_tup: Further arguments of each module, by name.
        devices: The devices of the modules. None: the devices of the inputs.

    Returns:
        The output of each module.
    """
    devices = [_device_of(each) for each in inputs] if devices is None else devices
    workers = _workers(devices)
    if workers is None:
        return nn.parallel.parallel_apply(modules, inputs, kwargs_tup, devices)
    named = kwargs_tup or [{} for _ in modules]
    outputs = []
    for module, given, more, worker in zip(modules, inputs, named, workers, strict=True):
        with torch.worker.device(worker):  # type: ignore[attr-defined]
            outputs.append(module(*(given if isinstance(given, list | tuple) else (given,)), **more))
    return outputs


def gather(outputs: Any, target_device: Device, dim: int = 0) -> Any:
    """Gather tensors of several devices on one device, in any nesting of tuples, lists and dicts.

    Args:
        outputs: One value for each device, all of the same nesting.
        target_device: The device that receives the tensors.
        dim: The dimension along which they are concatenated. Tensors without dimensions form a vector.

    Returns:
        One value of the same nesting as each of `outputs`.
    """
    if not isinstance(_tensor_in(outputs), RemoteTensor):
        return nn.parallel.gather(outputs, target_device, dim)  # type: ignore[arg-type]
    (device,) = _workers([target_device]) or [torch.device(target_device)]

    def join(parts: Sequence[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Tensor):
            if dim == 0 and all(part.dim() == 0 for part in parts):
                warnings.warn(
                    "Was asked to gather along dimension 0, but all input tensors were scalars; "
                    "will instead unsqueeze and return a vector.",
                    stacklevel=2,
                )
                parts = [part.view(1) for part in parts]
            return torch.cat([part.to(device) for part in parts], dim)
        if first is None:
            return None
        if isinstance(first, dict):
            if any(len(part) != len(first) for part in parts):
                raise ValueError("All dicts must have the same number of keys")
            return type(first)((key, join([part[key] for part in parts])) for key in first)
        joined = map(join, zip(*parts, strict=True))
        return first._make(joined) if hasattr(first, "_fields") else type(first)(joined)

    return join(outputs)


class _Function(Function):
    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> tuple[Any, ...]: ...


class _BroadcastToReplicas(_Function):
    """Copies tensors of the first worker to each worker. Returns all of the first, then all of the second, ..."""

    @staticmethod
    def forward(ctx: Any, workers: list[torch.device], *tensors: Any) -> tuple[Any, ...]:
        ctx.workers = workers
        # Absent gradients stay None. torch would replace them with zeros, which would then be sent.
        ctx.set_materialize_grads(False)
        copied = [[each if each is None else each.detach() for each in tensors]]
        copied += [_copies(tensors, worker) for worker in workers[1:]]
        fixed = [not needed for needed in ctx.needs_input_grad[1:]]
        ctx.mark_non_differentiable(
            *(
                each
                for copies in copied
                for each, alone in zip(copies, fixed, strict=True)
                if alone and each is not None
            )
        )
        return tuple(each for copies in copied for each in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # The backward is a Function, too, so that higher derivatives exist.
        return None, *_Sum.apply(ctx.workers, *grads)


class _Sum(_Function):
    """The transposed operation: adds up the workers' tensors on the first worker, in the order of the workers."""

    @staticmethod
    def forward(ctx: Any, workers: list[torch.device], *tensors: Any) -> tuple[Any, ...]:
        ctx.workers = workers
        ctx.set_materialize_grads(False)
        count = len(tensors) // len(workers)
        total: list[Any] = [each if each is None else each.detach() for each in tensors[:count]]
        for start in range(count, len(tensors), count):
            moved = _copies(tensors[start : start + count], workers[0])
            both = [i for i in range(count) if total[i] is not None and moved[i] is not None]
            if both:
                # These copies have no other owner, so they can be changed in place.
                torch._foreach_add_([moved[i] for i in both], [total[i] for i in both])
            total = [here if there is None else there for here, there in zip(total, moved, strict=True)]
        return tuple(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, *_BroadcastToReplicas.apply(ctx.workers, *grads)


def _copies(tensors: Sequence[Any], worker: torch.device) -> list[Any]:
    """Return copies on a worker. The copy of None is None."""
    there: list[Any] = [each for each in tensors if each is not None]
    place = place_of(worker)
    made: Iterator[Any] = iter(there[0]._place.master.transfers.copies(there, place) if there else ())
    return [None if each is None else next(made) for each in tensors]


def _kind(device: Device) -> str:
    """Return the type of a device. A number is a worker if CUDA is not available and workers exist, else CUDA."""
    if isinstance(device, int):
        return "cuda" if torch.cuda.is_available() or _all_workers() is None else "worker"
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def _all_workers() -> list[torch.device] | None:
    """Return the workers of this process's master, or None if it has no master."""
    try:
        return [torch.device("worker", rank) for rank in master_of_this_process().ranks]
    except NotInitializedError:
        return None


def _workers(devices: Sequence[Device]) -> list[torch.device] | None:
    """Return devices that are workers, or None if they are other devices.

    Raises:
        UsageError: A worker does not exist, or only some of the devices are workers.
    """
    kinds = {*map(_kind, devices)}
    if "worker" not in kinds:
        return None
    if len(kinds) > 1:
        raise UsageError(
            f"device_ids: expected either workers or devices of this process, not both: {[*map(str, devices)]}"
        )
    master_of_this_process()  # without a master, torch does not have a device named worker
    places = [
        place_of(torch.device("worker", each) if isinstance(each, int) else torch.device(each)) for each in devices
    ]
    for place in places:
        if len(place.ranks) > 1:
            raise UsageError(f"device_ids: expected workers, not a {place}")
    return [place.device for place in places]


def _output_device(given: Device | None, workers: list[torch.device]) -> torch.device:
    if given is None:
        return workers[0]
    return (_workers([given]) or [torch.device("cpu" if given == -1 else given)])[0]


def _tensor_in(value: Any) -> Tensor | None:
    """Return the first tensor in a nesting, or None."""
    if isinstance(value, Tensor):
        return value
    nested: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    return next((found for found in map(_tensor_in, nested) if found is not None), None)


def _device_of(value: Any) -> Any:
    found = _tensor_in(value)
    return None if found is None else found.device
