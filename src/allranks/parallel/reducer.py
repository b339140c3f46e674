"""Follows the backwards of one model and reduces its gradients.

*Which* backwards are synchronised is decided by their forward, as in torch: a forward outside
`no_sync` hangs a hook on its outputs, and the backward that reaches this hook is synchronised (so
are second backwards of the same graph, which torch leaves out). The hook also marks the outermost
backward, which re-entrant ones (activation checkpoints) run inside.

*How* a backward is reduced depends on whether it is known beforehand who gets gradients:

- **known** (all parameters do, or with a static graph those of its first backward): bucket k is
  started when all its gradients are there and bucket k - 1 was started: the same order on every
  rank, whatever the order of the hooks. Where all CPUs are busy computing, nothing is started
  before the backward has ended. The last bucket is kept until then: behind its gradients each rank puts a
  mark if its backward did not go as expected. A rank that lacks gradients sends zeros for them, so that
  nobody waits for it, and all can say who lacks what.
- **not known** (unused parameters are to be found, or a static graph's first backward): at the end of
  backward the ranks tell each other whose gradients they have, and reduce the buckets in which
  anybody has one. Nothing need be searched in the graph, but nothing overlaps either.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allranks._errors import UsageError, rank_list
from allranks._group import ProcessGroup
from allranks._host import usable_cpus
from allranks._types import ReduceOp
from allranks._work import Work
from allranks.parallel.buckets import Bucket
from allranks.parallel.hooks import CommHook, GradBucket, HookWork

__all__ = ["Reducer"]


class _Sent(NamedTuple):
    bucket: Bucket
    message: Tensor  # with the mark, if this bucket carries it
    work: Work | HookWork | None


class Reducer:
    """The hooks on one model's parameters and outputs, and what they have seen.

    Args:
        named: The parameters that are trained, with their names.
        buckets: All of them, in the order in which they are reduced.
        group: Who reduces.
        find_unused: It is not known beforehand who gets gradients.
        static: It is known after the first backward.

    Attributes:
        hook: What reduces a bucket in place of an all-reduce.
        announce: Called before the first collective of a backward; returns by how much the sum over the
            ranks is divided. For uneven inputs.
        has_reduced: Whether any backward was reduced.
        overlap: Whether to reduce beside the backward. Ranks may differ in it: the calls are the same.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        buckets: list[Bucket],
        group: ProcessGroup,
        find_unused: bool,
        static: bool,
    ) -> None:
        self.hook: CommHook | None = None
        self.announce: Callable[[], int] | None = None
        self.has_reduced = False
        # Reducing beside the backward takes a CPU that has nothing else to do. Without one, rank and
        # progress thread only take turns, which made a step of benchmarks/ddp_step.py on two CPUs
        # 5 to 8 % longer than reducing after it.
        self.overlap = usable_cpus() > group.size() * torch.get_num_threads()

        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._buckets = buckets
        self._number_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.indices}
        self._group = group
        self._static = static

        # Who gets a gradient on any rank, and how many each gets here; None while that is not known.
        self._used: Collection[int] | None = None
        self._due: list[int] | None = None
        self._order: list[int] = []  # the buckets that are reduced
        self._outstanding = [0] * len(buckets)  # parameters of each that get gradients here
        if not (find_unused or static):
            self._learn(range(len(named)), [1] * len(named))

        self._touched: set[int] = set()  # who got a gradient since the last reduction, in no_sync too
        self._expected = False  # the last forward was synchronised
        self._backward: weakref.ref[partial[None]] | None = None
        self._sent: list[_Sent] = []
        self._reset()
        self._watch_parameters()

    def _learn(self, used: Collection[int], due: list[int] | None) -> None:
        """From now on it is known who gets gradients (``due`` None: not yet, how many here)."""
        self._used, self._due = used, due
        self._order = self._order_of(used)
        for index, gradients in enumerate(due or ()):
            self._outstanding[self._number_of[index]] += gradients > 0

    # --- what autograd calls ---

    def before_forward(self, sync: bool) -> None:
        """Before each forward that records a graph; its backward is synchronised if ``sync``."""
        # A forward inside a backward is an activation checkpoint being recomputed.
        if torch._C._current_graph_task_id() != -1:
            return
        if self._backward is not None:
            self._reset()
        # For what gets its gradient before any output does: a parameter that only the loss uses.
        self._expected = sync

    def watch(self, output: Any) -> None:
        """Lets the backward that reaches these outputs of a forward be synchronised."""
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> None:
        # Weakly: a parameter outlives its wrappers, and must neither keep them nor obey them then.
        me = weakref.ref(self)

        def watch_parameter(index: int, parameter: nn.Parameter) -> Any:
            def hook(_: Tensor) -> None:
                reducer = me()
                if reducer is not None:
                    reducer._on_gradient(index)

            return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

        handles = [watch_parameter(index, parameter) for index, parameter in enumerate(self._parameters)]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def _on_output(self, _: Tensor) -> None:
        if not self._running():
            self._begin()

    def _on_gradient(self, index: int) -> None:
        self._touched.add(index)
        if not self._running():
            if not self._expected:
                return
            self._begin()
        self._got[index] += 1
        if self._due is not None and self._got[index] == self._due[index]:
            self._missing[self._number_of[index]] -= 1
            if self.overlap:
                self._start_complete()

    def _running(self) -> bool:
        # The engine lets go of the callback when a backward ends, however it ends.
        return self._backward is not None and self._backward() is not None

    def _begin(self) -> None:
        if self._backward is not None:  # the last one was broken off by an exception
            self._reset()
        callback = partial(self._end)
        self._backward = weakref.ref(callback)
        # Runs when this backward ends, in the thread that called backward().
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        try:
            if any(self._got) or self._due is None or not any(self._due):
                self._expected = False
                self._reduce()
            # else it is torch.autograd.grad() for the inputs: nothing to reduce
        finally:
            self._reset()

    def _reset(self) -> None:
        sent, self._sent = self._sent, []
        self._backward = None
        self._opened = False
        self._got = [0] * len(self._names)  # gradients in this backward
        self._missing = self._outstanding.copy()
        for _, _, work in sent:
            if work is not None:
                work.wait()  # so that the memory is ours again

    # --- reducing ---

    def shadow(self) -> None:
        """Takes part, with zeros, in a backward of the ranks that still have inputs."""
        known = self._used is not None
        used = self._agree_on_used(()) if self._used is None else self._used
        order = self._order_of(used)
        marks = None
        for number in order:
            marked = known and self._carries_mark(number)
            message = self._buckets[number].empty(marked)
            work = self._send(number, message, number == order[-1])
            if work is not None:
                work.wait()
            marks = message[-1] if marked else None
        if known:
            self._judge(None, marks)
        elif self._static and used:
            self._learn(used, None)

    def _reduce(self) -> None:
        known = self._used is not None
        if self._used is None:
            self._open()
            used = self._agree_on_used(i for i in self._touched if self._parameters[i].grad is not None)
            self._order = self._order_of(used)
        else:
            used = self._used
        while len(self._sent) < len(self._order):
            self._start_next(used)
        for _, _, work in self._sent:
            if work is not None:
                work.wait()
        if known:
            self._judge(self._got, self._sent[-1].bucket.mark if self._carries_mark(self._order[-1]) else None)
        for bucket, message, _ in self._sent:
            if self.hook is None and self._divisor != self._group.size():
                message.mul_(self._group.size() / self._divisor)
            bucket.give_back(used)
        self._sent.clear()
        self._touched.clear()
        self.has_reduced = True
        if self._static and self._due is None and used:
            self._learn(used, self._got)

    def _start_complete(self) -> None:
        while len(self._sent) < len(self._order) - 1 and not self._missing[self._order[len(self._sent)]]:
            assert self._used is not None
            self._start_next(self._used)

    def _start_next(self, used: Collection[int]) -> None:
        self._open()
        number = self._order[len(self._sent)]
        if self.hook is not None and self._sent:
            # What a hook's callbacks call must not mix with the next hook's calls in another order elsewhere.
            work = self._sent[-1].work
            assert work is not None
            work.wait()
        bucket = self._buckets[number]
        mark = self._got != (self._due or self._got) if self._carries_mark(number) else None
        message = bucket.fill(used, mark)
        self._sent.append(_Sent(bucket, message, self._send(number, message, number == self._order[-1])))

    def _carries_mark(self, number: int) -> bool:
        """Whether the ranks' marks travel with this bucket; a hook would stumble over them."""
        return self._used is not None and self.hook is None and number == self._order[-1] and self._buckets[number].flat

    def _send(self, number: int, message: Tensor, is_last: bool) -> Work | HookWork | None:
        if self.hook is not None:
            return self.hook.start(GradBucket(number, message, self._buckets[number].parameters, is_last))
        return self._group.all_reduce(message, ReduceOp.AVG, self.overlap)

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._divisor = self._group.size() if self.announce is None else self.announce()

    def _order_of(self, used: Collection[int]) -> list[int]:
        """The buckets that are reduced, in order."""
        return [n for n, bucket in enumerate(self._buckets) if any(index in used for index in bucket.indices)]

    # --- what the ranks tell each other ---

    def _agree_on_used(self, mine: Iterable[int]) -> Collection[int]:
        """Whose gradient any rank has."""
        flags = torch.zeros(len(self._names), dtype=torch.uint8)
        flags[list(mine)] = 1
        self._group.all_reduce(flags, ReduceOp.MAX)
        return frozenset(flags.nonzero().flatten().tolist())

    def _judge(self, got: list[int] | None, marks: Tensor | None) -> None:
        """Raises on every rank if on any rank other parameters got gradients than was expected.

        Args:
            got: How many gradients each parameter got here; None: this rank only shadows.
            marks: Of all ranks together, one element, if they travelled with a bucket.
        """
        due = self._due
        if got is None or due is None:  # nothing was expected here
            got = due = [0] * len(self._names)
        if marks is None:
            marks = torch.tensor(int(got != due))
            self._group.all_reduce(marks, ReduceOp.MAX)
        if marks.item():
            mine = torch.tensor([got, due])
            everyones = mine.new_empty(self._group.size(), *mine.shape)
            self._group.all_gather(everyones, mine)
            raise UsageError(self._complaint(everyones.tolist()))

    def _complaint(self, everyones: list[list[list[int]]]) -> str:
        """Says which parameters got too few gradients or too many, and on which ranks."""
        problems: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for index, name in enumerate(self._names):
            ranks: dict[str, list[int]] = {}
            for rank, (got, due) in zip(self._group.ranks, everyones, strict=True):
                if got[index] != due[index]:
                    few = "no gradient" if not got[index] else f"{got[index]} gradients in place of {due[index]}"
                    ranks.setdefault(few, []).append(rank)
            shown = name if self._parameters[index].requires_grad else f"{name} (frozen after wrapping)"
            for few, who in ranks.items():
                problems.setdefault((few, tuple(who)), []).append(shown)
        parts = [
            f"{few} to {len(names)} of {len(self._names)} parameters on {rank_list(ranks)}: "
            + ", ".join(names[:5])
            + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            for (few, ranks), names in problems.items()
        ]
        if self._static:
            remedy = "With static_graph=True every backward must be as the first was; leave it out if they differ."
        elif any(few == "no gradient" for few, _ in problems):
            remedy = (
                "Every trained parameter must take part in the loss of every rank: use it, or "
                "requires_grad_(False) before wrapping, or pass find_unused_parameters=True."
            )
        else:
            remedy = (
                "Does a re-entrant checkpoint use a parameter twice? Then use_reentrant=False or static_graph=True."
            )
        return (
            f"DistributedDataParallel: backward gave {'; '.join(parts)}. "
            f"What is in .grad now is not the mean over the ranks. {remedy}"
        )


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
