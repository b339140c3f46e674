"""Data-parallel training: `DistributedDataParallel`, with torch's names and meaning.

Each rank holds the whole model and works on its own part of the batch; after ``backward()`` every
``.grad`` holds the mean over the ranks, so that equal optimisers keep equal weights equal.

Here is the interface: arguments, forward, contexts. The work is done in

- `models`: at construction the ranks compare their parameter lists (a different model on one rank would
  otherwise end as a hang or as garbage) and take rank 0's values;
- `buckets`: gradients are reduced in buckets, in the reverse of the parameters' order, which is about the
  order in which backward produces them;
- `reducer`: follows the backwards, and reduces each bucket when it is complete;
- `hooks`: a user's function in the all-reduce's place;
- `join`: ranks that have run out of inputs.

Left to others: the reduction itself (`allranks._api.collectives`), dealing out the data
(`allranks.data`). Not there: sparse gradients, mixed precision, device meshes, delayed all-reduce.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020 (https://arxiv.org/abs/2006.15704); torch/nn/parallel/distributed.py for the interface.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_FIRST_BUCKET_MB = 1  # torch's figure: a small first bucket can start early
_WHO = "DistributedDataParallel"


class DistributedDataParallel(nn.Module):
    """Wraps a module for data-parallel training.

    ::

        model = allranks.nn.parallel.DistributedDataParallel(LeNet())
        loss_function(model(my_part_of_the_batch), targets).backward()  # .grad: the mean over ranks
        optimizer.step()

    The mean over ranks is the gradient of the mean loss over the global batch if every rank's loss
    is a mean over equally many samples. ``state_dict()`` keys start with ``module.`` as in torch;
    save ``model.module.state_dict()`` to be free of the wrapper. With one rank nothing is sent.

    Every parameter with ``requires_grad`` must get a gradient in each synchronised backward, on every
    rank; but see ``find_unused_parameters`` and ``static_graph``. Freeze and convert parameters *before*
    wrapping. Several backwards that go through different parts of one forward's outputs are, unlike in torch,
    each reduced when they end: add the losses and call backward once, or use ``find_unused_parameters``.

    Can be copied and pickled where the process group is the default one; a communication hook does not
    go along.

    Args:
        module: The model, the same on every rank in all but values.
        device_ids: The device that the whole module is on, in a list; inputs are moved there. None or empty: they
            are not moved, and the module may be on the CPU or on several devices, the same on every rank.
        output_device: For torch's signature: outputs stay where the module makes them.
        dim: For torch's signature; without ``device_ids`` it has no effect.
        broadcast_buffers: Take rank 0's buffers now, and at the start of each forward that follows a
            synchronised one, in training and in evaluation. True if None.
        init_sync: Compare parameter lists and take rank 0's parameters and buffers now. With
            False the ranks must already be equal; nobody checks.
        process_group: Who takes part; the world by default. "Rank 0" is the first rank of this group.
        bucket_cap_mb: Small gradients are reduced in flat buckets of at most so many MiB; 25 if None.
        find_unused_parameters: Parameters may be unused, on some ranks or on all. Where any rank has a
            gradient, all get the mean (no gradient counts as zero); where none has, ``.grad`` is not
            touched. Nothing overlaps with the backward then.
        check_reduction: For torch's signature; without effect there, too.
        gradient_as_bucket_view: ``.grad`` of small parameters become views into the bucket, which
            saves its memory and, with ``zero_grad(set_to_none=False)``, both copies.
        static_graph: Every backward is as the first one is, in which the ranks learn what is unused.
            Allows re-entrant checkpoints that use a parameter several times. A backward that gives more
            gradients to a parameter, or fewer, is an error on every rank.
        delay_all_reduce_named_params: Not supported.
        param_to_hook_all_reduce: Not supported.
        mixed_precision: Not supported; use torch.autocast, or a hook that sends 16 bits.
        device_mesh: Not supported; give a ``process_group``.
        skip_all_reduce_unused_params: What is unused on all ranks is never sent; without effect.
        bucket_cap_mb_list: The caps of the first buckets, in MiB; ``bucket_cap_mb`` holds for the rest.
        batched_grad_copy: It is always so; without effect.
        forward_sync_buffers: As ``broadcast_buffers``, but buffers are taken now in any case.

    Attributes:
        overlap: Whether buckets are reduced while backward is still computing the next ones. That takes a CPU
            that has nothing else to do, so it is True where the module is on a GPU, or each rank finds ``usable
            CPUs > ranks * torch.get_num_threads()`` at construction. It is False for a module on the CPU that was
            wrapped by a single rank, also when more ranks join later. Can be set, to the same on all ranks and
            between steps::

                model = DistributedDataParallel(LeNet())
                model.overlap = True

    Raises:
        UsageError: An argument that is not supported, a sparse embedding, parameters on a device whose tensors the
            group does not move, or nothing to train. From
            ``backward()``, on every rank: parameters got no gradient, or a second one, or were converted to
            another dtype since wrapping; names them and the ranks.
        MismatchError: The ranks' models differ in more than values, or their options do. Raised on every
            rank; names the ranks that differ and the options or the first parameter in which they do. From
            ``backward()``: an optimizer has used gradients that were not averaged, and the values differ now.
        NotInitializedError: There is no process group yet.

    Cost: Construction: one broadcast of the model. Step: one all-reduce of the gradients, those of
    parameters under 1 MiB being copied in and out once more; with ``find_unused_parameters`` another
    one of a byte per parameter.
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
    ) -> None:
        super().__init__()
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
        )
        caps = [25 if bucket_cap_mb is None else bucket_cap_mb]
        caps = [*bucket_cap_mb_list, *caps] if bucket_cap_mb_list else [min(_FIRST_BUCKET_MB, *caps), *caps]
        if min(caps) <= 0:
            raise UsageError(f"{_WHO}: bucket_cap_mb must be > 0, is {min(caps)}")
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
        self.bucket_bytes_cap_list = [int(cap * _MB) for cap in bucket_cap_mb_list or ()]
        self._caps = [cap * _MB for cap in caps]
        # Where all CPUs are computing, rank and progress thread would only take turns, which made a step of
        # benchmarks/ddp_step.py on two CPUs 5 to 8 % longer than reducing after the backward.
        self._overlap = not trained[0].is_cpu
        if self.process_group.size() > 1:
            self._overlap |= usable_cpus() > self.process_group.size() * torch.get_num_threads()
            self._agree(init_sync, init_buffers)
        # else the CPUs of this host do not count: ranks that join later have not exchanged them, and cannot, as they
        # join at different times.
        self._connect(shared=True)

    @property
    def overlap(self) -> bool:
        """Whether buckets are reduced beside the backward; the same on all ranks."""
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
        """Calls the module; ``backward()`` on the result is synchronised (but see `no_sync`)."""
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
            source = active[-1]  # rank 0's buffers may be old; torch, too, takes the highest rank's
        if take_buffers:
            self._take_buffers(source)
        output = self.module(*args, **kwargs)
        if sync:
            reducer.watch(output)
        self.require_forward_param_sync = sync
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here only add to the local ``.grad``; so does their backward.

        The next synchronised backward averages what has been added up::

            with model.no_sync():
                for part in parts[:-1]:
                    model(part).sum().backward()
            model(parts[-1]).sum().backward()  # sends

        It is the *forward* that counts: one made outside is synchronised even if its backward is
        inside.
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
        """Ranks may have unevenly many inputs in here.

        ::

            with model.join():
                for part in my_parts:  # 5 on one rank, 7 on another
                    loss_function(model(part)).backward()
                    optimizer.step()

        A rank that leaves goes along with the others, with zeros for its gradients, until all have left. Then
        all take the parameters and buffers of a rank that was in use to the end.

        Args:
            divide_by_initial_world_size: Gradients are divided by the number of ranks; with False by the
                number of those that still have inputs.
            enable: False: does nothing, for when inputs are known to be even.
            throw_on_early_termination: When a rank leaves before the others, all raise.

        Raises:
            UsageError: Another join is not over yet: joining several models is not supported.
            MismatchError: ``throw_on_early_termination``; or ranks that have inputs do different things.

        Cost: for each forward and each reduced backward an all-reduce of 8 bytes per rank; at the end a
        broadcast of the model.
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
            to_the_end = True
            while (announced := uneven.announce(Act.LISTEN))[0] is not Act.LISTEN:
                to_the_end = False
                act, active = announced
                if act is Act.FORWARD_WITH_BUFFERS:
                    self._take_buffers(active[-1])
                elif act is Act.BACKWARD:
                    reducer.shadow()
        finally:
            self._uneven = reducer.announce = None
        buffers = self._synced_buffers() if self.forward_sync_buffers else []
        parameters = self._synced_parameters()
        self._authoritative_rank = uneven.last(to_the_end)
        broadcast_values([t for _, t in (*parameters, *buffers)], group, self._authoritative_rank)
        self.require_forward_param_sync = True

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Lets a function reduce the gradients, a bucket at a time, in the all-reduce's place.

        ::

            def halves(group, bucket):
                work = allranks.all_reduce(bucket.buffer().half(), ReduceOp.AVG, group, async_op=True)
                return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

            model.register_comm_hook(None, halves)

        Args:
            state: Its first argument.
            hook: Called with ``state`` and a `GradBucket`; returns a ``torch.futures.Future`` of the tensor that
                all ranks shall have in place of the bucket's, with as many elements. It has to divide by the
                number of ranks itself. A bucket's future is waited for before the next bucket's hook is called.
                Ready-made ones: `allranks.algorithms.ddp_comm_hooks.default_hooks`.

        Raises:
            TypeError: ``hook`` cannot be called.
            UsageError: There is a hook already, or its annotations are those of something else. From
                ``backward()``: the hook raised, or returned something else.
        """
        if self._reducer is not None and self._reducer.hook is not None:
            raise UsageError(f"{_WHO}: register_comm_hook can only be called once.")
        comm_hook = CommHook(state, hook)
        if self._reducer is None:  # one rank alone needs it for the hook only
            self._reducer = self._make_reducer(shared=False)
        self._reducer.hook = comm_hook

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward takes rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffer_places)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer is not None and self._reducer.has_reduced:
            raise UsageError(f"{_WHO}: _set_static_graph() should be called before training loop starts")
        self.static_graph = True
        if self._reducer is not None:
            reducer = self._make_reducer(shared=True)
            reducer.hook = self._reducer.hook
            self._reducer = reducer

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """torch's way of leaving parameters and buffers to somebody else; names as in ``named_parameters()``."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    def _agree(self, init_sync: bool, init_buffers: bool) -> None:
        """What the ranks must have in common: options, model, values, and whether they overlap."""
        if not init_sync:
            wish = torch.tensor([self._overlap], dtype=torch.uint8, device="cpu").to(self.process_group.device)
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
            "bucket caps in bytes": self._caps,
        }
        self._overlap = require_same_model(parameters, buffers, options, self._overlap, self.process_group)
        broadcast_values([t for _, t in (*parameters, *buffers)], self.process_group)

    def _connect(self, shared: bool) -> None:
        self._uneven = None
        # Places, not tensors: a module may put a new tensor in a buffer's place.
        self._buffer_places = [
            (owner, name)
            for prefix, owner in self.module.named_modules()
            for name in owner._buffers
            if f"{prefix}.{name}".lstrip(".") not in self.parameters_to_ignore
        ]
        self._reducer = self._make_reducer(shared) if self.process_group.size() > 1 else None

    def _reducer_of_group(self) -> Reducer | None:
        """Return the reducer. None while the group has had a single rank only.

        The group of an elastic job may have more ranks later, in the same object. Creating the reducer then involves no
        collective, as ranks that join later create theirs at another time.
        """
        if self._reducer is None and self.process_group.size() > 1:
            self._reducer = self._make_reducer(shared=False)
        return self._reducer

    def renew(self) -> None:
        """Forget what the reducer has learned from earlier backwards. Sends nothing.

        Called on every rank after a loss: a process that replaces a lost rank has learned nothing of a static graph,
        and would call other collectives than the ranks that have.
        """
        if self._reducer is not None and self.static_graph:
            reducer = self._make_reducer(shared=False)
            reducer.hook = self._reducer.hook
            self._reducer = reducer

    def _make_reducer(self, shared: bool) -> Reducer:
        named = self._trained_parameters()
        group = self.process_group if shared else None
        buckets = plan([p for _, p in named], self._caps, group, self.gradient_as_bucket_view)
        return Reducer(
            named, buckets, self.process_group, self.find_unused_parameters, self.static_graph, self._overlap
        )

    def _synced_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._synced_parameters() if p.requires_grad and p.numel()]

    def _synced_buffers(self) -> list[tuple[str, Tensor]]:
        return [(n, b) for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]

    def _take_buffers(self, source: int) -> None:
        there = [getattr(owner, name) for owner, name in self._buffer_places]
        buffers = [buffer for buffer in there if buffer is not None]
        # As in torch: two forwards before a backward shall be possible, although the first one's graph may
        # hold a buffer (batch normalisation's does, without need).
        with _unsafe_preserve_version_counter(tuple(buffers)):
            broadcast_values(buffers, self.process_group, source)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not world.resolve_group(None):
            raise UsageError(
                f"{_WHO}: it can be copied and pickled only if its process group is the default one; use .module"
            )
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("process_group", "_reducer", "_buffer_places", "_uneven")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = world.resolve_group(None)
        self._connect(shared=False)  # one rank may make a copy alone


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(f"{_WHO}: {name} is not supported by allranks; leave it out")


def _check_initialized(module: nn.Module) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UsageError(f"{_WHO}: the module has uninitialized parameters. Run a dummy forward pass first")


def _check_module(
    module: nn.Module,
    trained: list[nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    backend: str,
) -> None:
    if not trained:
        raise UsageError(
            f"{_WHO} is not needed when a module doesn't have any parameter that requires a gradient: "
            "use the module itself"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(f"{_WHO}: device_ids can only be None or contain a single element.")
    devices = {p.device for p in module.parameters()}
    where = ", ".join(sorted(map(str, devices)))
    if any(not _engines.moves(backend, device.type) for device in devices):
        raise UsageError(
            f"{_WHO}: the module's parameters are on {where}, but the group's engine is {backend}, which does not move "
            "such tensors. docs/engines.md says which engine moves what"
        )
    if (device_ids or output_device is not None) and any(device.type == "cpu" for device in devices):
        raise UsageError(
            f"{_WHO}: device_ids and output_device only work with GPU modules: leave them out. Got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters on {where}."
        )
    if device_ids and devices != {_as_device(device_ids[0], trained[0].device.type)}:
        raise UsageError(f"{_WHO}: device_ids is {list(device_ids)}, but the module's parameters are on {where}")
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise UsageError(
            f"{_WHO}: SyncBatchNorm layers only work with GPU modules, and in groups of torch.distributed's own"
        )
    reduced = {id(parameter) for parameter in trained}
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and id(layer.weight) in reduced:
            raise UsageError(
                f"{_WHO}: sparse gradients are not supported. Leave out sparse=True in {name or 'the module'} "
                f"({type(layer).__name__}), or freeze it"
            )


def _as_device(given: int | str | torch.device, kind: str) -> torch.device:
    device = torch.device(kind, given) if isinstance(given, int) else torch.device(given)
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())
