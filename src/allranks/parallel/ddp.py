"""Data-parallel training: `DistributedDataParallel`, with torch's names and semantics.

Each rank holds the whole model and processes its own part of the batch. After ``backward()`` every ``.grad`` holds the
mean over the ranks. Equal optimizers therefore keep equal weights equal.

This module contains the interface: arguments, forward, contexts. Other modules do the work:

- `models`: at construction, the ranks compare their parameter lists and take rank 0's values. Without this check, a
  different model on one rank would cause a hang or wrong results.
- `buckets`: gradients are reduced in buckets, in the reverse order of the parameters. Backward produces them in
  approximately this order.
- `reducer`: tracks the backwards, and reduces each bucket when it is complete.
- `hooks`: a user function that replaces the all-reduce.
- `join`: ranks that have run out of inputs.

Other packages provide the reduction itself (`allranks._api.collectives`) and the distribution of the data
(`allranks.data`). Not supported: sparse gradients, mixed precision, device meshes, delayed all-reduce.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020 (https://arxiv.org/abs/2006.15704); torch/nn/parallel/distributed.py for the interface.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from allranks import _engines
from allranks._api import world
from allranks._base.errors import UsageError
from allranks._call.types import ReduceOp
from allranks._cluster.host import usable_cpus
from allranks._group.process_group import ProcessGroup
from allranks.parallel.buckets import plan
from allranks.parallel.hooks import CommHook, Hook
from allranks.parallel.join import Act, UnevenInputs, alone
from allranks.parallel.models import broadcast_values, require_same_model
from allranks.parallel.reducer import Reducer

__all__ = ["DistributedDataParallel"]

_MB = 1 << 20
_FIRST_BUCKET_MB = 1  # the value of torch: a small first bucket can start early
_CHECK_EVERY = 100  # a comparison takes about 10 % of a step of a small model, so 0.1 % of the time
_WHO = "DistributedDataParallel"


class DistributedDataParallel(nn.Module):
    """Wrap a module for data-parallel training.

    ::

        model = allranks.nn.parallel.DistributedDataParallel(LeNet())
        loss_function(model(my_part_of_the_batch), targets).backward()  # .grad: the mean over ranks
        optimizer.step()

    The mean over ranks is the gradient of the mean loss over the global batch if every rank's loss is a mean over the
    same number of samples. The keys of ``state_dict()`` start with ``module.``, as in torch. Save
    ``model.module.state_dict()`` to store a state that does not depend on the wrapper. With one rank, no data is sent.

    Every parameter with ``requires_grad`` must receive a gradient in each synchronized backward, on every rank. The
    options ``find_unused_parameters`` and ``static_graph`` relax this rule. Freeze and convert parameters *before*
    wrapping. If several backwards use different parts of the outputs of one forward, each backward is reduced when it
    ends, unlike in torch. In this case, add the losses and call backward once, or use ``find_unused_parameters``.

    The wrapper can be copied and pickled if its process group is the default group. A communication hook is not copied.

    Args:
        module: The model. On every rank, everything except its values must be the same.
        device_ids: A list with the device that holds the whole module. Inputs are moved to it. None or empty: inputs
            are not moved, and the module can be on the CPU or on several devices, the same on every rank.
        output_device: Accepted for compatibility with torch: outputs stay on the device on which the module creates
            them.
        dim: Accepted for compatibility with torch. Without ``device_ids`` it has no effect.
        broadcast_buffers: Take rank 0's buffers now, and at the start of each forward that follows a synchronized one,
            in training and in evaluation. True if None.
        init_sync: Compare parameter lists, and take rank 0's parameters and buffers now. If False, the ranks must
            already be equal. This is not checked.
        process_group: The ranks that take part. The default is the world. "Rank 0" is the first rank of this group.
        bucket_cap_mb: Maximum size in MiB of a flat bucket of small gradients. 25 if None.
        find_unused_parameters: Parameters may be unused, on some ranks or on all. If any rank has a gradient, all ranks
            receive the mean (a missing gradient counts as zero). If no rank has a gradient, ``.grad`` is not changed.
            Reductions then do not overlap with the backward.
        check_reduction: Accepted for compatibility with torch, where it has no effect either.
        gradient_as_bucket_view: The ``.grad`` of small parameters become views into the bucket. This saves the memory
            of the bucket and, with ``zero_grad(set_to_none=False)``, both copies.
        static_graph: Every backward is like the first one, in which the ranks detect unused parameters. Allows
            re-entrant checkpoints that use a parameter several times. If a later backward gives a parameter more or
            fewer gradients, every rank raises an error.
        delay_all_reduce_named_params: Not supported.
        param_to_hook_all_reduce: Not supported.
        mixed_precision: Not supported. Use torch.autocast, or a hook that sends 16 bits.
        device_mesh: Not supported. Pass a ``process_group``.
        skip_all_reduce_unused_params: No effect: parameters that are unused on all ranks are never sent.
        bucket_cap_mb_list: The caps of the first buckets, in MiB. ``bucket_cap_mb`` applies to the rest.
        batched_grad_copy: No effect: copies are always batched.
        forward_sync_buffers: Like ``broadcast_buffers``, but the buffers are always taken at construction.
        lazy_bucket_allocation: Not supported.
        check_every: Number of synchronized backwards after which the ranks compare their parameters. 0: never. None:
            100, or never with a communication hook, because hooks such as ``post_localSGD_hook`` make them differ. Not
            in torch. A ``State`` compares the ranks itself, so this has no effect in its loops.

    Attributes:
        overlap: Whether buckets are reduced while backward computes the next ones. This needs an idle CPU. It is
            therefore True if the module is on a GPU, or if each rank finds
            ``usable CPUs > ranks * torch.get_num_threads()`` at construction. It is False for a module on the CPU that
            a single rank wrapped, even if more ranks join later. It can be set, to the same value on all ranks
            and between steps::

                model = DistributedDataParallel(LeNet())
                model.overlap = True

    Raises:
        UsageError: An argument is not supported, an embedding is sparse, the group cannot move tensors of the
            parameters' device, or no parameter is trained. From ``backward()``, on every rank: parameters received no
            gradient, or a second one, or were converted to another dtype after wrapping. The error names the parameters
            and the ranks.
        MismatchError: The ranks' models differ in more than values, or their options differ. Raised on every rank. The
            error names the ranks that differ, and the options or the first parameter in which they differ. From
            ``backward()``: the values of a parameter differ. The error names the first element that differs.
        NotInitializedError: The process group is not initialized.

    Cost: Construction: one broadcast of the model. Step: one all-reduce of the gradients. Gradients of parameters under
    1 MiB are also copied in and out once. With ``find_unused_parameters``, one more all-reduce of a byte per parameter.
    Every ``check_every`` steps: a hash of the parameters (10 GB/s) and an all-gather of 8 bytes.
    """

    _reducer: Reducer | None
    _uneven: UnevenInputs | None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        check_every: int | None = None,
    ) -> None:
        super().__init__()
        _refuse(
            lazy_bucket_allocation=lazy_bucket_allocation or None,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
        )
        # 25 MiB is torch's default.
        caps = [25 if bucket_cap_mb is None else bucket_cap_mb]
        caps = [*bucket_cap_mb_list, *caps] if bucket_cap_mb_list else [min(_FIRST_BUCKET_MB, *caps), *caps]
        if check_every is not None and check_every < 0:
            raise UsageError(f"{_WHO}: check_every must be >= 0, but is {check_every}")
        if min(caps) <= 0:
            raise UsageError(f"{_WHO}: bucket_cap_mb must be > 0, but is {min(caps)}")
        self.process_group = world.resolve_group(process_group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        _check_initialized(module)
        trained = [p for _, p in self._trained_parameters()]
        _check_module(module, trained, device_ids, output_device, self.process_group.backend)

        self._inputs_to = trained[0].device if device_ids else None
        self.device_ids = None if self._inputs_to is None else [self._inputs_to.index]
        self.output_device = output_device
        self.dim = dim
        init_buffers = broadcast_buffers is not False or forward_sync_buffers is not None
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.bucket_bytes_cap = int(caps[-1] * _MB)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self._check_every = check_every
        self.bucket_bytes_cap_list = [int(cap * _MB) for cap in bucket_cap_mb_list or ()]
        self._caps = [cap * _MB for cap in caps]
        # If all CPUs compute, the rank and the progress thread compete for them. A step of benchmarks/ddp_step.py on
        # two CPUs then took 5 to 8 % longer than with a reduction after the backward.
        self._overlap = not trained[0].is_cpu
        if self.process_group.size() > 1:
            self._overlap |= usable_cpus() > self.process_group.size() * torch.get_num_threads()
            self._agree(init_sync, init_buffers)
        # A single rank ignores the CPUs of this host: ranks that join later have not exchanged their values, and
        # cannot, because they join at different times.
        self._connect(shared=True)

    @property
    def overlap(self) -> bool:
        """Whether buckets are reduced during the backward; the same on all ranks."""
        return self._overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self._overlap = value
        if self._reducer is not None:
            self._reducer.overlap = value

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards take rank 0's buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. A ``backward()`` on the result is synchronized, except inside `no_sync`."""
        there = self._inputs_to
        if there is not None:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(there, non_blocking=True), (args, kwargs))
        reducer = self._reducer_of_group()
        if reducer is None:
            return self.module(*args, **kwargs)
        grad = torch.is_grad_enabled()
        sync = grad and self.require_backward_grad_sync
        if grad:
            reducer.before_forward(sync)
        source = 0
        take_buffers = self.will_sync_module_buffers()
        if self._uneven is not None:
            _, active = self._uneven.announce(Act.FORWARD_WITH_BUFFERS if take_buffers else Act.FORWARD)
            source = active[-1]  # rank 0's buffers can be old; torch also takes those of the highest rank
        if take_buffers:
            self._take_buffers(source)
        output = self.module(*args, **kwargs)
        if sync:
            reducer.watch(output)
        self.require_forward_param_sync = sync
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction: the backwards of forwards in this context only add to the local ``.grad``.

        The next synchronized backward averages the accumulated gradients::

            with model.no_sync():
                for part in parts[:-1]:
                    model(part).sum().backward()
            model(parts[-1]).sum().backward()  # sends

        The *forward* decides: a forward outside the context is synchronized even if its backward is inside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Allow different numbers of inputs on the ranks.

        ::

            with model.join():
                for part in my_parts:  # 5 on one rank, 7 on another
                    loss_function(model(part)).backward()
                    optimizer.step()

        A rank that leaves the loop takes part in the collectives of the other ranks, with zeros for its gradients,
        until all ranks have left. All ranks then take the parameters and buffers of a rank that had inputs until the
        end.

        Args:
            divide_by_initial_world_size: True: gradients are divided by the number of ranks. False: by the number of
                ranks that still have inputs.
            enable: False: no effect, for inputs that are known to be even.
            throw_on_early_termination: If a rank leaves before the others, all ranks raise.

        Raises:
            UsageError: Another join is active in this thread. Joining several models is not supported.
            MismatchError: A rank left early and ``throw_on_early_termination`` is set, or the ranks that have inputs do
                different things.

        Cost: for each forward and each reduced backward, an all-reduce of 8 bytes per rank; at the end, a broadcast of
        the model.
        """
        if not enable or self._reducer_of_group() is None:
            yield
            return
        with alone():
            yield from self._joined(divide_by_initial_world_size, throw_on_early_termination)

    def _joined(self, divide_by_initial_world_size: bool, throw_on_early_termination: bool) -> Iterator[None]:
        reducer, group = self._reducer, self.process_group
        assert reducer is not None
        uneven = UnevenInputs(group, divide_by_initial_world_size, throw_on_early_termination)
        self._uneven = uneven
        reducer.announce = uneven.announce_backward
        try:
            yield
            # Stays True only on a rank that never had to listen: its parameters are the newest.
            to_the_end = True
            while (announced := uneven.announce(Act.LISTEN))[0] is not Act.LISTEN:
                to_the_end = False
                act, active = announced
                if act is Act.FORWARD_WITH_BUFFERS:
                    self._take_buffers(active[-1])
                elif act is Act.BACKWARD:
                    reducer.shadow()
        finally:
            # Also after an error: a later backward must not announce itself to ranks that have left.
            self._uneven = reducer.announce = None
        # Ranks without inputs have made no optimizer steps, so their parameters are old.
        buffers = self._synced_buffers() if self.forward_sync_buffers else []
        parameters = self._synced_parameters()
        self._authoritative_rank = uneven.last(to_the_end)
        broadcast_values([t for _, t in (*parameters, *buffers)], group, self._authoritative_rank)
        self.require_forward_param_sync = True

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a function that replaces the all-reduce and reduces the gradients one bucket at a time.

        ::

            def halves(group, bucket):
                work = allranks.all_reduce(bucket.buffer().half(), ReduceOp.AVG, group, async_op=True)
                return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

            model.register_comm_hook(None, halves)

        Args:
            state: The first argument of the hook.
            hook: Called with ``state`` and a `GradBucket`. Returns a ``torch.futures.Future`` of the tensor that
                replaces the bucket's tensor on all ranks, with the same number of elements. The hook must divide by the
                number of ranks itself. The future of a bucket is awaited before the hook is called for the next bucket.
                Ready-made hooks: `allranks.algorithms.ddp_comm_hooks.default_hooks`.

        Raises:
            TypeError: ``hook`` is not callable.
            UsageError: A hook is already registered, or the annotations of ``hook`` are not those of a hook. From
                ``backward()``: the hook raised, or returned another type.
        """
        if self._reducer is not None and self._reducer.hook is not None:
            raise UsageError(f"{_WHO}: register_comm_hook can only be called once.")
        comm_hook = CommHook(state, hook)
        if self._reducer is None:  # a single rank needs a reducer only to run the hook
            self._reducer = self._make_reducer(shared=False)
        self._reducer.hook = comm_hook
        self._reducer.check_every = self._check_every or 0

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward takes rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffer_places)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer is not None and self._reducer.has_reduced:
            raise UsageError(f"{_WHO}: _set_static_graph() should be called before training loop starts")
        self.static_graph = True
        if self._reducer is not None:
            self._replace_reducer(self._reducer, shared=True)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Exclude parameters and buffers from synchronization, as in torch. Names are as in ``named_parameters()``."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    def _agree(self, init_sync: bool, init_buffers: bool) -> None:
        """Compare options and models, take rank 0's values, and agree on ``overlap``."""
        if not init_sync:
            # Moved to the group's device, because an engine such as nccl accepts no CPU tensor.
            wish = torch.tensor([self._overlap], dtype=torch.uint8, device="cpu").to(self.process_group.device)
            # Overlap only if it is enabled on every rank: all ranks must make their calls in the same order.
            self.process_group.all_reduce(wish, ReduceOp.MIN)
            self._overlap = bool(wish)
            return
        parameters = self._synced_parameters()
        buffers = self._synced_buffers() if init_buffers else []
        options = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "forward_sync_buffers": self.forward_sync_buffers,
            "broadcast_buffers": init_buffers,
            "check_every": self._check_every,
            "bucket caps in bytes": self._caps,
        }
        self._overlap = require_same_model(parameters, buffers, options, self._overlap, self.process_group)
        broadcast_values([t for _, t in (*parameters, *buffers)], self.process_group)

    def _connect(self, shared: bool) -> None:
        self._uneven = None
        # Store locations, not tensors: a module may replace the tensor of a buffer.
        self._buffer_places = [
            (owner, name)
            for prefix, owner in self.module.named_modules()
            for name in owner._buffers
            if f"{prefix}.{name}".lstrip(".") not in self.parameters_to_ignore
        ]
        self._reducer = self._make_reducer(shared) if self.process_group.size() > 1 else None

    def _reducer_of_group(self) -> Reducer | None:
        """Return the reducer. None while the group has had a single rank only.

        In an elastic job, the same group object may have more ranks later. Creating the reducer then involves no
        collective, because ranks that join later create their reducer at another time.
        """
        if self._reducer is None and self.process_group.size() > 1:
            self._reducer = self._make_reducer(shared=False)
        return self._reducer

    def renew(self) -> None:
        """Discard the state that the reducer has recorded in earlier backwards. Sends nothing.

        Called on every rank after a loss. A process that replaces a lost rank has no record of a static graph, and
        would call other collectives than the ranks that have one.
        """
        if self._reducer is not None and self.static_graph:
            # Not shared: a process that replaces a lost rank creates its buckets at another time.
            self._replace_reducer(self._reducer, shared=False)

    def compare_replicas(self, every: int) -> None:
        """Set the number of synchronized backwards after which the ranks compare their parameters. 0: never."""
        self._check_every = every
        if self._reducer is not None:
            self._reducer.check_every = every

    def _replace_reducer(self, old: Reducer, shared: bool) -> None:
        self._reducer = self._make_reducer(shared)
        self._reducer.hook, self._reducer.check_every = old.hook, old.check_every

    def _make_reducer(self, shared: bool) -> Reducer:
        named = self._trained_parameters()
        group = self.process_group if shared else None
        buckets = plan([p for _, p in named], self._caps, group, self.gradient_as_bucket_view)
        return Reducer(
            named,
            buckets,
            self.process_group,
            self.find_unused_parameters,
            self.static_graph,
            self._overlap,
            # Not a method of the wrapper, which the reducer must not keep alive. The parameters are read again at each
            # comparison, because a program may have replaced one.
            partial(_synced_parameters, self.module, self.parameters_to_ignore),
            _CHECK_EVERY if self._check_every is None else self._check_every,
        )

    def _synced_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return _synced_parameters(self.module, self.parameters_to_ignore)

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._synced_parameters() if p.requires_grad and p.numel()]

    def _synced_buffers(self) -> list[tuple[str, Tensor]]:
        return [(n, b) for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]

    def _take_buffers(self, source: int) -> None:
        there = [getattr(owner, name) for owner, name in self._buffer_places]
        buffers = [buffer for buffer in there if buffer is not None]
        # As in torch: two forwards before a backward must be possible, although the graph of the first forward may hold
        # a buffer. The graph of batch normalization does, without need.
        with _unsafe_preserve_version_counter(tuple(buffers)):
            broadcast_values(buffers, self.process_group, source)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not world.resolve_group(None):
            raise UsageError(
                f"{_WHO}: it can be copied and pickled only if its process group is the default one.\n"
                "  Copy or pickle .module instead."
            )
        return {
            # These belong to this process. `__setstate__` recreates them.
            k: v
            for k, v in self.__dict__.items()
            if k not in ("process_group", "_reducer", "_buffer_places", "_uneven")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = world.resolve_group(None)
        self._connect(shared=False)  # no collective: one rank may create a copy alone


def _synced_parameters(module: nn.Module, ignored: Collection[str]) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(f"{_WHO}: {name} is not supported by allranks.\n  Omit this argument.")


def _check_initialized(module: nn.Module) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UsageError(f"{_WHO}: the module has uninitialized parameters.\n  Run a dummy forward pass first.")


def _check_module(
    module: nn.Module,
    trained: list[nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    backend: str,
) -> None:
    if not trained:
        raise UsageError(
            f"{_WHO} is not needed when a module doesn't have any parameter that requires a gradient.\n"
            "  Use the module itself."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(f"{_WHO}: device_ids can only be None or contain a single element.")
    devices = {p.device for p in module.parameters()}
    where = ", ".join(sorted(map(str, devices)))
    if any(not _engines.moves(backend, device.type) for device in devices):
        raise UsageError(
            f"{_WHO}: the module's parameters are on {where}, but the group's engine is {backend}, which does not "
            "support such tensors.\n  Choose an engine that supports them; see docs/engines.md."
        )
    if (device_ids or output_device is not None) and any(device.type == "cpu" for device in devices):
        raise UsageError(
            f"{_WHO}: device_ids and output_device only work with GPU modules. Got device_ids {device_ids}, "
            f"output_device {output_device}, and module parameters on {where}.\n  Omit both arguments."
        )
    if device_ids and devices != {_as_device(device_ids[0], trained[0].device.type)}:
        raise UsageError(
            f"{_WHO}: device_ids is {list(device_ids)}, but the module's parameters are on {where}.\n"
            "  Move the module to this device before wrapping it, or omit device_ids."
        )
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise UsageError(
            f"{_WHO}: SyncBatchNorm layers only work with GPU modules, and only in groups of torch.distributed.\n"
            "  Use BatchNorm layers, or torch's DistributedDataParallel on a GPU."
        )
    reduced = {id(parameter) for parameter in trained}
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and id(layer.weight) in reduced:
            raise UsageError(
                f"{_WHO}: sparse gradients are not supported.\n  Omit sparse=True in {name or 'the module'} "
                f"({type(layer).__name__}), or freeze it."
            )


def _as_device(given: int | str | torch.device, kind: str) -> torch.device:
    device = torch.device(kind, given) if isinstance(given, int) else torch.device(given)
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())
