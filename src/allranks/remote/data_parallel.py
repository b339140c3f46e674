"""`torch.nn.DataParallel` on workers: one program, each worker computes a part of the batch.

Each forward scatters the inputs, copies the module to the other workers, calls the copies and gathers what they return.
The calls are only queued, so that a simple loop runs them side by side; what waits for a value in its forward
(``.item()``) holds up the others. Parameters and buffers travel as one command for each worker, and so do the gradients
on their way back.

The functions are those of torch.nn.parallel and leave all devices but workers to them, and so does the class.
Where they differ: a parameter that no worker's part of the batch has used has no gradient, as in a module that is not
parallel; torch's has zeros there.

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

    The module keeps its parameters on the first of them, where the gradients are added up; it sees parts of the batch,
    so that batch normalisation is of each part. ``state_dict`` has torch's names (``module.``).

    Args:
        module: with all parameters and buffers on ``device_ids[0]``.
        device_ids: the workers, ``["worker:1", "worker:2"]``; None for all that there are. CUDA devices make it
            torch's own, ``"cpu"`` leaves the module as it is.
        output_device: where outputs are gathered; None for ``device_ids[0]``. ``"cpu"`` waits for them.
        dim: along which tensors are cut and gathered.

    Raises:
        UsageError: there is no such worker, or the devices are not all of one kind.

    Cost:
        each forward sends parameters and buffers once to each other worker, each backward the gradients once back;
        ``mw.group()`` with ``all_reduce_`` does without the former.
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
            nn.Module.__init__(self)
            self.module, self.dim = module, dim
            self.device_ids: list[Any] = workers
            self.src_device_obj = workers[0]
            self.output_device: Any = _output_device(output_device, workers)
            if len(workers) == 1:
                self.module.to(workers[0])

    # torch's forward calls these.

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
    """Calls a module once as `DataParallel` does.

    Args:
        module: with all parameters and buffers on ``device_ids[0]``.
        inputs: a tuple of arguments, or one.
        device_ids: see `DataParallel`.
        output_device: see `DataParallel`.
        dim: see `DataParallel`.
        module_kwargs: further arguments, by name.

    Returns:
        What the copies of the module return, gathered.
    """
    if (_all_workers() if device_ids is None else _workers(device_ids)) is None:
        return nn.parallel.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)  # type: ignore[arg-type]
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*inputs, **(module_kwargs or {}))


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """Cuts the tensors in any nesting of tuples, lists and dicts, and puts the parts on devices.

    Args:
        inputs: what is no tensor goes to all devices as it is.
        target_gpus: the devices.
        dim: along which to cut, as ``torch.chunk`` does: the last part may be smaller, and there may be fewer parts
            than devices.

    Returns:
        What `inputs` is, once for each device that gets a part.
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
    """Both, as often as the longer of the two."""
    if _workers(devices) is None:
        return nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, devices, dim)
    positional = [*scatter(inputs, devices, dim)] if inputs else []
    named = [*scatter(kwargs, devices, dim)] if kwargs else []
    positional += [()] * (len(named) - len(positional))
    named += [{}] * (len(positional) - len(named))
    return tuple(positional), tuple(named)


def replicate(network: T, devices: Sequence[Device], detach: bool = False) -> list[T]:
    """Copies a module to devices; the gradients of the copies are added up in the module's own parameters.

    The copies have no parameters, but tensors that depend on the module's; the first shares its memory with the module.

    Args:
        network: on ``devices[0]``.
        devices: the devices.
        detach: no gradients are wanted.

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
            # No longer leaves, so that they are not parameters. By setattr, as RNNs keep a list of theirs.
            former = OrderedDict((name, copies.get(each)) for name, each in module._parameters.items())
            for name, copy in former.items():
                setattr(twin, name, copy)
            twin.__dict__["_former_parameters"] = former  # some look there for what a torch's replica has
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
    """Calls each module with its inputs, on its device.

    Args:
        modules: one for each device.
        inputs: a tuple or list of arguments for each, or one argument.
        kwargs_tup: further arguments of each, by name.
        devices: of the modules; None for where the inputs are.

    Returns:
        What each returned.
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
    """Puts tensors of several devices together on one, in any nesting of tuples, lists and dicts.

    Args:
        outputs: one for each device, all of the same nesting.
        target_device: where to.
        dim: along which; tensors without dimensions make a vector.

    Returns:
        What each of `outputs` is.
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
    """Tensors of the first worker, on each worker: all of the first, then all of the second, ..."""

    @staticmethod
    def forward(ctx: Any, workers: list[torch.device], *tensors: Any) -> tuple[Any, ...]:
        ctx.workers = workers
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
        return None, *_Sum.apply(ctx.workers, *grads)


class _Sum(_Function):
    """The transposed map: adds up the workers' tensors on the first, in the order of the workers."""

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
                torch._foreach_add_([moved[i] for i in both], [total[i] for i in both])  # nobody else has these copies
            total = [here if there is None else there for here, there in zip(total, moved, strict=True)]
        return tuple(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, *_BroadcastToReplicas.apply(ctx.workers, *grads)


def _copies(tensors: Sequence[Any], worker: torch.device) -> list[Any]:
    """Copies on a worker; of None, None."""
    there: list[Any] = [each for each in tensors if each is not None]
    place = place_of(worker)
    made: Iterator[Any] = iter(there[0]._place.master.transfers.copies(there, place) if there else ())
    return [None if each is None else next(made) for each in tensors]


def _kind(device: Device) -> str:
    """The type of a device. A number is of a CUDA device where there are any, and of a worker elsewhere."""
    if isinstance(device, int):
        return "cuda" if torch.cuda.is_available() or _all_workers() is None else "worker"
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def _all_workers() -> list[torch.device] | None:
    """Those of this process' master; None if there is none."""
    try:
        return [torch.device("worker", rank) for rank in master_of_this_process().ranks]
    except NotInitializedError:
        return None


def _workers(devices: Sequence[Device]) -> list[torch.device] | None:
    """Devices that are workers; None if they are others.

    Raises:
        UsageError: there is no such worker, or some are workers and others are not.
    """
    kinds = {*map(_kind, devices)}
    if "worker" not in kinds:
        return None
    if len(kinds) > 1:
        raise UsageError(f"device_ids: workers, or devices of this process, but not both: {[*map(str, devices)]}")
    master_of_this_process()  # without one torch does not know the word
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
    """The first tensor in a nesting."""
    if isinstance(value, Tensor):
        return value
    nested: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    return next((found for found in map(_tensor_in, nested) if found is not None), None)


def _device_of(value: Any) -> Any:
    found = _tensor_in(value)
    return None if found is None else found.device
