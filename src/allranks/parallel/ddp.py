"""Data-parallel training: `DistributedDataParallel`, with torch's names and meaning.

Each rank holds the whole model and works on its own part of the batch; after ``backward()`` every
``.grad`` holds the mean over the ranks, so that equal optimisers keep equal weights equal.

How, in three parts:

- at construction the ranks compare their parameter lists (a different model on one rank would
  otherwise end as a hang or as garbage) and take rank 0's values;
- gradients are reduced in *buckets*, in the reverse of the parameters' order, which is about the
  order in which backward produces them. Bucket k is started when all its gradients are there and
  bucket k - 1 was started: the same order on every rank, whatever the order of the hooks. Where
  all CPUs are busy computing, nothing is started before the backward has ended;
- when ``backward()`` returns, the mean is in every ``.grad``.

A large parameter is a bucket of its own and is reduced where it lies, in its ``.grad``; only small
ones are copied together. On a CPU copying a gradient costs about as much as reducing it through
shared memory, so the flat buffer that torch fills and empties for every gradient would be most of
the time.

*Which* backwards are synchronised is decided by their forward, as in torch: a forward outside
`no_sync` hangs a hook on its outputs, and the backward that reaches this hook is synchronised (so
are second backwards of the same graph, which torch leaves out). The hook also marks the outermost
backward, which re-entrant ones (activation checkpoints) run inside.

Left to others: the reduction itself (`allranks._collectives`), dealing out the data
(`allranks.data`). Not there yet: ``find_unused_parameters``, ``static_graph``, communication
hooks, ``join``, GPU placement by ``device_ids``.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020 (https://arxiv.org/abs/2006.15704); torch/nn/parallel/distributed.py for the interface.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allranks import _collectives, _world
from allranks._errors import MismatchError, UsageError
from allranks._group import ProcessGroup
from allranks._host import usable_cpus
from allranks._types import ReduceOp
from allranks._work import Work

__all__ = ["DistributedDataParallel"]

_MB = 1024 * 1024

# A bucket's first all-reduce can start early if it is small (torch's figure).
_FIRST_BUCKET_BYTES = _MB

# From this size on, copying into a flat buffer and back costs more than an all-reduce of its own.
_ALONE_BYTES = _MB

_LATER = "is not supported yet by allranks' DistributedDataParallel; leave it out"


class DistributedDataParallel(nn.Module):
    """Wraps a module for data-parallel training.

    ::

        model = allranks.nn.parallel.DistributedDataParallel(LeNet())
        loss_function(model(my_part_of_the_batch), targets).backward()  # .grad: the mean over ranks
        optimizer.step()

    The mean over ranks is the gradient of the mean loss over the global batch if every rank's loss
    is a mean over equally many samples. ``state_dict()`` keys start with ``module.`` as in torch;
    save ``model.module.state_dict()`` to be free of the wrapper. With one rank nothing is sent.

    Every parameter with ``requires_grad`` must get a gradient in each synchronised backward. Freeze
    parameters *before* wrapping.

    Args:
        module: The model, the same on every rank in all but values.
        device_ids: Only None or empty: the module stays where it is.
        output_device: Only None.
        dim: For torch's signature; without ``device_ids`` it has no effect.
        broadcast_buffers: Take rank 0's buffers at the start of each forward in training mode
            (outside `no_sync`).
        init_sync: Compare parameter lists and take rank 0's parameters and buffers now. With
            False the ranks must already be equal; nobody checks.
        process_group: Who takes part; the world by default.
        bucket_cap_mb: Small gradients are reduced in flat buckets of at most so many MiB.
        find_unused_parameters: Not yet.
        check_reduction: For torch's signature; without effect there, too.
        gradient_as_bucket_view: ``.grad`` of small parameters become views into the bucket, which
            saves its memory and, with ``zero_grad(set_to_none=False)``, both copies.
        static_graph: Not yet.
        mixed_precision: Not yet.
        device_mesh: Not yet.

    Raises:
        UsageError: An argument that is not supported, or nothing to train. From ``backward()``:
            parameters got no gradient (names them), or a second one.
        MismatchError: The ranks' models differ in more than values. Raised on every rank; on the
            one that differs it names the first parameter that does.
        NotInitializedError: There is no process group yet.

    Cost: Construction: one broadcast of the model. Step: one all-reduce of the gradients; those of
    parameters under 1 MiB are copied in and out once more.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        mixed_precision: Any = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        later = {
            "device_ids": device_ids,
            "output_device": output_device is not None,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "mixed_precision": mixed_precision,
            "device_mesh": device_mesh,
        }
        for name, value in later.items():
            if value:
                raise UsageError(f"DistributedDataParallel: {name} {_LATER}")
        bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        if bucket_cap_mb <= 0:
            raise UsageError(f"DistributedDataParallel: bucket_cap_mb must be > 0, is {bucket_cap_mb}")
        if not any(p.requires_grad for p in module.parameters()):
            raise UsageError("DistributedDataParallel: no parameter of the module requires a gradient")

        self.module = module
        self.process_group = process_group
        self.device_ids = None
        self.output_device = None
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self.bucket_bytes_cap = int(bucket_cap_mb * _MB)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._connect()
        if init_sync and self._reducer is not None:
            _require_same_model(module, process_group)
            _broadcast([*module.parameters(), *module.buffers()], process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; ``backward()`` on the result is synchronised (but see `no_sync`)."""
        if self._reducer is None:
            return self.module(*args, **kwargs)
        sync = self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._reducer.before_forward(sync)
        if sync and self.training and self.broadcast_buffers and self._buffer_places:
            buffers = (getattr(owner, name) for owner, name in self._buffer_places)
            _broadcast([b for b in buffers if b is not None], self.process_group)
        output = self.module(*args, **kwargs)
        if sync and torch.is_grad_enabled():
            self._reducer.watch(output)
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

    def _connect(self) -> None:
        # Places, not tensors: a module may put a new tensor in a buffer's place.
        self._buffer_places = [(m, name) for m in self.module.modules() for name in m._buffers]
        self._reducer: _Reducer | None = None
        world_size = _world.get_world_size(self.process_group)
        if world_size > 1:
            named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
            self._reducer = _Reducer(named, self.process_group, self.bucket_bytes_cap, self.gradient_as_bucket_view)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise UsageError(
                "DistributedDataParallel: with a process_group it cannot be copied or pickled; use .module"
            )
        return {k: v for k, v in self.__dict__.items() if k not in ("_reducer", "_buffer_places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()


class _Bucket:
    """Gradients that are reduced together: one where it lies, or several through a flat buffer."""

    def __init__(self, members: list[tuple[int, nn.Parameter]]) -> None:
        self.indices = [index for index, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.missing = len(members)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._copy_back = False
        self._work: Work | None = None

    def start(self, group: ProcessGroup | None, as_view: bool, async_op: bool) -> None:
        """Sends the gradients off. They must not be touched until `finish`."""
        gradients: list[Tensor] = []
        for parameter in self.parameters:
            gradient = parameter.grad
            assert gradient is not None  # its hook has just seen it
            if gradient.layout != torch.strided:
                raise UsageError("DistributedDataParallel: sparse gradients are not supported (Embedding(sparse=True))")
            gradients.append(gradient.detach() if gradient.requires_grad else gradient)
        in_place = len(gradients) == 1 and gradients[0].is_contiguous()
        self._copy_back = not in_place and not as_view
        message = gradients[0] if in_place else self._gather(gradients, as_view)
        self._work = _collectives.all_reduce(message, ReduceOp.AVG, group, async_op)

    def finish(self) -> None:
        """Waits; then the mean is in every ``.grad``."""
        self.drain()
        if self._copy_back:
            torch._foreach_copy_([p.grad for p in self.parameters], self._views)  # type: ignore[misc]

    def drain(self) -> None:
        """Waits, so that the memory is ours again."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _gather(self, gradients: list[Tensor], as_view: bool) -> Tensor:
        if self._flat is None:
            sizes = [p.numel() for p in self.parameters]
            self._flat = gradients[0].new_empty(sum(sizes))
            parts = torch.split(self._flat, sizes)
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        # By identity: after zero_grad(set_to_none=False) backward has added into the views.
        fresh = [i for i, p in enumerate(self.parameters) if p.grad is not self._views[i]]
        if fresh:
            torch._foreach_copy_([self._views[i] for i in fresh], [gradients[i] for i in fresh])
        if as_view:
            for i in fresh:
                self.parameters[i].grad = self._views[i]
        return self._flat


class _Reducer:
    """Follows the backwards of one model and reduces its gradients.

    Per backward: idle -> (first hook of a synchronised backward) running -> (its end) idle. An
    exception in the user's backward leaves it running; the next forward tidies up.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], group: ProcessGroup | None, cap: int, as_view: bool
    ) -> None:
        self._group = group
        self._as_view = as_view
        self._names = [name for name, _ in named]
        self._buckets = _plan([p for _, p in named], cap)
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._running = False
        self._expected = False
        self._ready: set[int] = set()
        self._started = 0
        # Reducing beside the backward takes a CPU that has nothing else to do. Without one, rank and
        # progress thread only take turns, which made a step of benchmarks/ddp_step.py on two CPUs
        # 5 to 8 % longer than reducing after it. Ranks may differ in this: the calls are the same.
        self.overlap = usable_cpus() > _world.get_world_size(group) * torch.get_num_threads()

        # Weakly: a parameter outlives its wrappers, and must neither keep them nor obey them then.
        me = weakref.ref(self)

        def watch_parameter(index: int, parameter: nn.Parameter) -> Any:
            def hook(_: Tensor) -> None:
                reducer = me()
                if reducer is not None:
                    reducer._on_gradient(index)

            return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

        handles = [watch_parameter(index, parameter) for index, (_, parameter) in enumerate(named)]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def before_forward(self, sync: bool) -> None:
        # A forward inside a backward is an activation checkpoint being recomputed.
        if torch._C._current_graph_task_id() != -1:
            return
        if self._running:
            self._reset()
        # For what gets its gradient before any output does: a parameter that only the loss uses.
        self._expected = sync

    def watch(self, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def _on_output(self, _: Tensor) -> None:
        if not self._running:
            self._begin()

    def _begin(self) -> None:
        self._running = True
        # Runs when this backward ends, in the thread that called backward().
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _on_gradient(self, index: int) -> None:
        if not self._running:
            if not self._expected:
                return
            self._begin()
        if index in self._ready:
            raise UsageError(
                f"DistributedDataParallel: parameter {self._names[index]} got a second gradient in one backward. "
                "Was the previous backward broken off (then call forward first), or does a re-entrant "
                "checkpoint use it twice (then use_reentrant=False)?"
            )
        self._ready.add(index)
        self._bucket_of[index].missing -= 1
        if self.overlap:
            self._start_complete()

    def _start_complete(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start(self._group, self._as_view, async_op=self.overlap)
            self._started += 1

    def _end(self) -> None:
        if not self._ready:  # torch.autograd.grad() for the inputs: nothing to reduce
            self._running = False
            return
        if len(self._ready) < len(self._names):
            missing = [name for index, name in enumerate(self._names) if index not in self._ready]
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UsageError(
                f"DistributedDataParallel: backward gave no gradient to {len(missing)} of {len(self._names)} "
                f"parameters: {shown}. Gradients are not averaged. Every trained parameter must take part in "
                "the loss: use it, or requires_grad_(False) before wrapping (find_unused_parameters is not "
                "supported yet)."
            )
        self._start_complete()
        for bucket in self._buckets:
            bucket.finish()
        self._expected = False
        self._reset()

    def _reset(self) -> None:
        self._running = False
        self._ready.clear()
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
        for bucket in self._buckets:
            bucket.drain()


def _plan(parameters: list[nn.Parameter], cap: int) -> list[_Bucket]:
    """Deals parameters, last first, to buckets, in the order in which these will be complete."""
    done: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
    limit = min(cap, _FIRST_BUCKET_BYTES)
    for index, parameter in reversed(list(enumerate(parameters))):
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes >= _ALONE_BYTES:
            done.append(_Bucket([(index, parameter)]))
            continue
        key = (parameter.dtype, parameter.device)
        members = filling.setdefault(key, [])
        if members and nbytes + sum(p.numel() * p.element_size() for _, p in members) > limit:
            done.append(_Bucket(members))
            limit = cap
            members = filling[key] = []
        members.append((index, parameter))
    rest = sorted(filling.values(), key=lambda members: members[-1][0], reverse=True)
    return done + [_Bucket(members) for members in rest if members]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _broadcast(tensors: list[Tensor], group: ProcessGroup | None) -> None:
    """Gives every rank the group's rank 0's values: large tensors in place, small ones together."""
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() >= _ALONE_BYTES and tensor.is_contiguous():
                _broadcast_bytes(tensor.detach(), group)
                # As copy_ does below: a graph that still needs the old values must notice.
                torch.autograd.graph.increment_version(tensor)
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in small.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            if not flat.numel():
                continue
            _broadcast_bytes(flat, group)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [part.view(t.shape) for part, t in zip(parts, same, strict=True)])


def _broadcast_bytes(tensor: Tensor, group: ProcessGroup | None) -> None:
    # As bytes: a broadcast does not compute, so any dtype can travel.
    _collectives.broadcast(tensor.view(-1).view(torch.uint8), 0, group)


def _require_same_model(module: nn.Module, group: ProcessGroup | None) -> None:
    """Raises on every rank if the model of any rank differs from rank 0's in more than values.

    Cost: 40 bytes where all is well.
    """
    lines = [f"parameter {_describe(n, p)}" for n, p in module.named_parameters()]
    lines += [f"buffer {_describe(n, b)}" for n, b in module.named_buffers()]
    digest = torch.frombuffer(bytearray(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.int64)
    theirs = digest.clone()
    _collectives.broadcast(theirs, 0, group)
    rank = _world.get_rank(group)
    same = torch.ones(_world.get_world_size(group), dtype=torch.int64)
    same[rank] = int(torch.equal(digest, theirs))
    _collectives.all_reduce(same, ReduceOp.MIN, group)
    different = [r for r, equal in enumerate(same.tolist()) if not equal]
    if not different:
        return
    # Now rank 0's list itself, so that a rank that differs can say where.
    text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
    length = torch.tensor([text.numel()])
    _collectives.broadcast(length, 0, group)
    if rank != 0:
        text = torch.empty(int(length), dtype=torch.uint8)
    _collectives.broadcast(text, 0, group)
    who = f"DistributedDataParallel on rank {rank}"
    if rank not in different:
        raise MismatchError(f"{who}: the model of rank {', '.join(map(str, different))} differs from rank 0's")
    reference = text.numpy().tobytes().decode().split("\n")
    position = next(i for i in range(len(lines) + 1) if lines[i : i + 1] != reference[i : i + 1])
    here, there = (("".join(side[position : position + 1]) or "nothing more") for side in (lines, reference))
    raise MismatchError(
        f"{who}: this rank's model differs from rank 0's ({len(lines)} against {len(reference)} tensors), "
        f"first at number {position}: here {here}, on rank 0 {there}"
    )


def _describe(name: str, tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{trained}"
