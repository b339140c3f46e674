"""Tracks the backwards of one model and reduces its gradients.

The forward decides *which* backwards are synchronized, as in torch. A forward outside `no_sync` registers a hook on its
outputs, and a backward that reaches this hook is synchronized. This includes second backwards of the same graph, which
torch does not reduce. The hook also marks the outermost backward, in which re-entrant backwards (activation
checkpoints) run.

*How* a backward is reduced depends on whether the set of parameters that get gradients is known in advance:

- **Known** (all parameters, or with a static graph the parameters of its first backward): bucket k starts when all its
  gradients exist and bucket k - 1 has started. The order is therefore the same on every rank, whatever the order of the
  hooks. If all CPUs are busy, no bucket starts before the backward has ended. The last bucket always waits for the end
  of the backward: after its gradients, each rank adds a mark if its backward was not as expected. A rank that lacks
  gradients sends zeros for them. No rank therefore waits for it, and every rank can report which gradients are missing
  on which rank.
- **Not known** (unused parameters must be found, or the first backward of a static graph): at the end of the backward,
  the ranks exchange which gradients they have. They reduce the buckets in which any rank has a gradient. This needs no
  search of the graph, but the reductions do not overlap with the backward.

*Gradients that are not reduced* (in `no_sync`, or of a forward that bypasses the wrapper) are correct if no optimizer
uses them as the mean. If parameters have changed between such a gradient and the next reduction, all ranks compare
their parameters in that reduction. An error then names the parameters that differ.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allranks._base.compilers import leave_to_python
from allranks._base.errors import UsageError, rank_list
from allranks._call import callsite
from allranks._call.types import ReduceOp
from allranks._call.work import Work
from allranks._engines.base import Engine
from allranks._group.plan import Plan
from allranks._group.process_group import ProcessGroup
from allranks.parallel.buckets import Bucket
from allranks.parallel.hooks import CommHook, GradBucket, HookWork
from allranks.parallel.models import require_same_values

__all__ = ["Reducer"]


# Negative codes that replace the number of gradients of a parameter: the kind of error.
_CONVERTED = -1
_TAKEN = -2
_CHANGED = -3
_WRONG = {
    _CONVERTED: "gradients of a dtype that has changed since wrapping",
    _TAKEN: "gradients that were removed from .grad before they were reduced",
    _CHANGED: "gradients (but something changed the parameter before they were reduced)",
}

_TOO_EARLY = (
    "DistributedDataParallel: {name} got its gradient in a backward within a backward (a re-entrant checkpoint). "
    "No output of the forward leads to it, so gradients were reduced before all were available. The values in .grad "
    "are not the mean over the ranks.\n  Return tensors, or lists, tuples, dicts, dataclasses or plain objects of "
    "tensors, or use checkpoint(..., use_reentrant=False)."
)

_COMPILED = (
    "DistributedDataParallel: backward runs in compiled autograd, which does not call the hooks that reduce "
    "gradients.\n  Set torch._dynamo.config.compiled_autograd = False. torch.compile(model), and torch.compile of a "
    "function that calls backward(), work without it."
)

_UNREDUCED = (
    "DistributedDataParallel: the parameters have changed since they received gradients that were not averaged over "
    "the ranks, and now receive more of them. If the program calls the wrapped module instead of its wrapper, the "
    "ranks train different models.\n  Call the wrapper: a backward averages gradients only after a forward of the "
    "wrapper."
)


class _Sent(NamedTuple):
    bucket: Bucket
    message: Tensor  # includes the mark if this bucket carries it
    work: Work | HookWork | None


class Reducer:
    """The hooks on the parameters and outputs of one model, and the state that they collect.

    Args:
        named: The trained parameters, with their names.
        buckets: All buckets, in the order in which they are reduced.
        group: The ranks that reduce.
        find_unused: The set of parameters that get gradients is not known in advance.
        static: This set is known after the first backward.
        overlap: Whether to reduce during the backward.
        values: Returns the values that must be equal on all ranks, with their names.
        check_every: Number of reduced backwards after which these values are compared. 0: never.

    Attributes:
        hook: A hook that replaces the all-reduce of each bucket.
        announce: Called before the first collective of a backward. Returns the divisor of the sum over the ranks. Used
            for uneven inputs.
        has_reduced: Whether any backward was reduced.
        overlap: The same on all ranks, because it decides the order of the reductions relative to the collectives of
            the model's own backward.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        buckets: list[Bucket],
        group: ProcessGroup,
        find_unused: bool,
        static: bool,
        overlap: bool,
        values: Callable[[], Iterable[tuple[str, Tensor]]],
        check_every: int,
    ) -> None:
        self.hook: CommHook | None = None
        self.announce: Callable[[], int] | None = None
        self.has_reduced = False
        self.overlap = overlap
        self.check_every = check_every
        self._values = values
        self._unchecked = 0  # reduced backwards since the last comparison
        self._checked_engine: Engine | None = None

        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._buckets = buckets
        self._number_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.indices}
        self._group = group
        self._static = static

        # The parameters with a gradient on any rank, and the number of gradients of each on this rank. None: not known
        # yet.
        self._used: Collection[int] | None = None
        self._due: list[int] | None = None
        self._order: list[int] = []  # the numbers of the buckets that are reduced
        self._outstanding = [0] * len(buckets)  # per bucket: the number of parameters that get gradients on this rank
        if not (find_unused or static):
            self._learn(range(len(named)), [1] * len(named))

        self._touched: set[int] = set()  # parameters with a gradient since the last reduction, also in no_sync
        # parameter versions at the first gradient outside a synchronized backward
        self._unreduced: list[int] | None = None
        self._versions = self._current_versions()  # at the start of the current backward
        self._expected = False  # the last forward was synchronized
        self._in_no_sync = False  # the last forward was in no_sync
        self._warned = self._forwarded = False
        self._last_task = -1  # autograd's number (increasing) of the last reduced backward
        self._backward: weakref.ref[partial[None]] | None = None
        self._sent: list[_Sent] = []
        self._plans: dict[int, tuple[Tensor, Plan]] = {}  # per flat bucket: the tensor and its reduction plan
        self._reset()
        self._watch_parameters()

    def _learn(self, used: Collection[int], due: list[int] | None) -> None:
        """Record which parameters get gradients (``due`` None: the numbers on this rank are not known yet)."""
        self._used, self._due = used, due
        self._order = self._order_of(used)
        for index, gradients in enumerate(due or ()):
            self._outstanding[self._number_of[index]] += gradients > 0

    # --- hooks that autograd calls ---

    def before_forward(self, sync: bool) -> None:
        """Prepare for a forward that records a graph. Its backward is synchronized if ``sync`` is true."""
        # A forward inside a backward recomputes an activation checkpoint.
        if torch._C._current_graph_task_id() != -1:
            return
        # An exception may have stopped the last backward, and its calls may still use the buckets.
        if self._backward is not None:
            self._reset()
        if not self._forwarded:
            self._forwarded = True
            self._take_over_optimizers()
        # Needed for a parameter that only the loss uses: it gets its gradient before any output does.
        self._expected, self._in_no_sync = sync, not sync

    def watch(self, output: Any) -> None:
        """Register hooks on the outputs of a forward: a backward that reaches them is synchronized."""
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> None:
        # Use a weak reference: a parameter can outlive its wrapper. It must neither keep the wrapper alive nor run its
        # hook then.
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
                # Task numbers increase. A backward that began before the last reduced one encloses it, so that
                # reduction was too early.
                if torch._C._current_graph_task_id() <= self._last_task:
                    raise UsageError(_TOO_EARLY.format(name=self._names[index]))
                self._on_unreduced()
                return
            # The enclosing backward may still add gradients, so a reduction cannot begin here.
            if _is_nested():
                raise UsageError(_TOO_EARLY.format(name=self._names[index]))
            self._begin()
        self._got[index] += 1
        if self._due is not None and self._got[index] == self._due[index]:
            self._missing[self._number_of[index]] -= 1
            if self.overlap:
                self._start_complete()

    def _on_unreduced(self) -> None:
        """Record a gradient that is not reduced, and warn if the program trains with such gradients."""
        if self._unreduced is None:
            self._unreduced = self._current_versions()
        elif not (self._in_no_sync or self._warned) and self._unreduced != self._current_versions():
            self._warned = True
            callsite.warn(_UNREDUCED)

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _running(self) -> bool:
        # The engine releases the callback when a backward ends, also if it ends with an error.
        return self._backward is not None and self._backward() is not None

    def _begin(self) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
            raise UsageError(_COMPILED)
        if self._backward is not None:  # an exception stopped the previous backward
            self._reset()
        self._task = torch._C._current_graph_task_id()
        self._versions = self._current_versions()
        callback = partial(self._end)
        self._backward = weakref.ref(callback)
        # Runs when this backward ends, in the thread that called backward().
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        try:
            if any(self._got) or (not any(self._due or ()) and _fills_all_gradients()):
                self._expected, self._last_task = False, self._task
                self._reduce()
                self._check()
            # else this is torch.autograd.grad() for the inputs: nothing to reduce
        finally:
            self._reset()

    def _reset(self) -> None:
        # Detached first, so that a failing wait does not leave the calls for the next backward.
        sent, self._sent = self._sent, []
        self._backward = None
        self._opened = False
        self._got = [0] * len(self._names)  # number of gradients of each parameter in this backward
        self._missing = self._outstanding.copy()
        for _, _, work in sent:
            if work is not None:
                work.wait()  # until then the operation may still use the memory

    # --- reducing ---

    def shadow(self) -> None:
        """Take part, with zeros, in a backward of the ranks that still have inputs."""
        known = self._used is not None
        used = self._agree_on_used([], False) if self._used is None else self._used
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
            nothing = [0] * len(self._names)
            self._judge(nothing, nothing, False, marks)
        elif self._static and used:
            self._learn(used, None)

    def _reduce(self) -> None:
        known = self._used is not None
        strayed = self._announce_stray()
        if self._used is None:
            self._open()
            used = self._agree_on_used([i for i in self._touched if self._parameters[i].grad is not None], strayed)
            self._order = self._order_of(used)
        else:
            used = self._used
        got, due = self._got_and_due(used)
        # Missing gradients are sent as zeros: otherwise the other ranks would wait for this one.
        while len(self._sent) < len(self._order):
            self._start_next(used, strayed or got != due)
        for _, _, work in self._sent:
            if work is not None:
                work.wait()
        if known:
            marks = self._sent[-1].bucket.mark if self._carries_mark(self._order[-1]) else None
            self._judge(got, due, strayed, marks)
        for bucket, message, _ in self._sent:
            # The all-reduce has divided by the number of ranks. In `join`, only ranks with inputs count.
            if self.hook is None and self._divisor != self._group.size():
                message.mul_(self._group.size() / self._divisor)
            bucket.give_back(used)
        # All calls were awaited above. `_reset` waits for those that an exception has left.
        self._sent.clear()
        self._touched.clear()
        self._unreduced = None
        self.has_reduced = True
        if self._static and self._due is None and used:
            self._learn(used, self._got)
        # After all buckets have their means, because an optimizer may clear the gradient.
        for index in used:
            self._step_in_backward(self._parameters[index])

    def _announce_stray(self) -> bool:
        """Return whether parameters of this rank have changed since they got gradients that were not reduced."""
        # In join, ranks without inputs have old parameters. All ranks take new ones when it ends.
        return self.announce is None and self._unreduced is not None and self._unreduced != self._versions

    def _take_over_optimizers(self) -> None:
        """Remove the hooks of torch's `_apply_optimizer_in_backward`: they would step with unreduced gradients."""
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._parameters):
            from torch.distributed.optim import apply_optimizer_in_backward

            handles: Any = apply_optimizer_in_backward.param_to_optim_hook_handle_map
            for parameter in self._parameters:
                for handle in handles.get(parameter, ()):
                    handle.remove()

    def _step_in_backward(self, parameter: nn.Parameter) -> None:
        """Run the optimizer steps of the removed hooks, now that ``.grad`` is the mean."""
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            # As torch's own hook does after the step.
            parameter.grad = None

    def _check(self) -> None:
        """Compare the values of the ranks if it is due.

        Raises:
            MismatchError: They differ.
        """
        # In join, ranks without inputs have old parameters.
        if not self.check_every or self.announce is not None:
            return
        # After a loss, ranks may have counted differently, and a new process has not counted. All have a new engine.
        if self._checked_engine is not self._group.engine:
            self._checked_engine, self._unchecked = self._group.engine, 0
        self._unchecked += 1
        if self._unchecked == self.check_every:
            self._unchecked = 0
            require_same_values(self._values(), self._group)

    def _start_complete(self) -> None:
        # The last bucket waits for the end of the backward, because it may carry the mark.
        while len(self._sent) < len(self._order) - 1 and not self._missing[self._order[len(self._sent)]]:
            assert self._used is not None
            self._start_next(self._used, False)

    def _start_next(self, used: Collection[int], wrong: bool) -> None:
        self._open()
        number = self._order[len(self._sent)]
        if self.hook is not None and self._sent:
            # Collectives from the callbacks of one hook must not interleave with the calls of the next hook: the order
            # could differ between ranks.
            work = self._sent[-1].work
            assert work is not None
            work.wait()
        bucket = self._buckets[number]
        mark = wrong if self._carries_mark(number) else None
        message = bucket.fill(used, mark)
        self._sent.append(_Sent(bucket, message, self._send(number, message, number == self._order[-1])))

    def _carries_mark(self, number: int) -> bool:
        """Return whether this bucket carries the marks of the ranks. A hook could not handle the extra element."""
        return self._used is not None and self.hook is None and number == self._order[-1] and self._buckets[number].flat

    def _send(self, number: int, message: Tensor, is_last: bool) -> Work | HookWork | None:
        if self.hook is not None:
            return self.hook.start(GradBucket(number, message, self._buckets[number].parameters, is_last))
        # autograd may replace the memory of this gradient, so a plan cannot be reused
        if not self._buckets[number].flat:
            return self._group.all_reduce(message, ReduceOp.AVG, self.overlap)
        planned, plan = self._plans.get(number, (None, None))
        # A plan belongs to one tensor. The bucket may have a new buffer.
        if plan is None or planned is not message:
            plan = self._group.plan("all_reduce", message, ReduceOp.AVG)
            self._plans[number] = message, plan
        return plan(self.overlap)

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._divisor = self._group.size() if self.announce is None else self.announce()

    def _order_of(self, used: Collection[int]) -> list[int]:
        """Return the numbers of the buckets that are reduced, in order."""
        return [n for n, bucket in enumerate(self._buckets) if any(index in used for index in bucket.indices)]

    # --- exchanges between the ranks ---

    def _agree_on_used(self, mine: list[int], strayed: bool) -> Collection[int]:
        """Return the parameters that have a gradient on any rank. Raises the errors of `_judge` on every rank."""
        wrong = self._wrong()
        flags = torch.zeros(len(self._names) + 1, dtype=torch.uint8, device="cpu")
        # Three states in one all-reduce with MAX: no gradient, a gradient, and an error, which dominates.
        flags[mine] = 1
        flags[list(wrong)] = 2
        flags[-1] = 2 * strayed
        flags = flags.to(self._group.device)
        self._group.all_reduce(flags, ReduceOp.MAX)
        if flags.max() > 1:
            nothing = [0] * len(self._names)
            self._explain([wrong.get(index, 0) for index in range(len(nothing))], nothing)
        return frozenset(flags[:-1].nonzero().flatten().tolist())

    def _wrong(self) -> dict[int, int]:
        """Return the parameters in a wrong state: for each index, a key of `_WRONG`."""
        found = {}
        # A hook may contain an optimizer, which steps as soon as the mean is known.
        versions = self._versions if self.hook is None else self._current_versions()
        for index, (parameter, dtype, version) in enumerate(zip(self._parameters, self._dtypes, versions, strict=True)):
            gradient = parameter.grad
            if parameter.dtype != dtype or (gradient is not None and gradient.dtype != dtype):
                found[index] = _CONVERTED
            elif self._got[index] and gradient is None:
                found[index] = _TAKEN
            elif self._got[index] and parameter._version != version:
                found[index] = _CHANGED
        return found

    def _got_and_due(self, used: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the number of gradients that each parameter got on this rank, and the expected number."""
        got, due = self._got.copy(), self._due
        if due is None:  # as after `shadow`: the local numbers are unknown, but no unused parameter may get a gradient
            due = [gradients if index in used else 0 for index, gradients in enumerate(got)]
        for index, what in self._wrong().items():
            got[index] = what
        return got, due

    def _judge(self, got: list[int], due: list[int], strayed: bool, marks: Tensor | None) -> None:
        """Raise on every rank if a backward was not as expected on any rank.

        Args:
            got: The number of gradients that each parameter got on this rank.
            due: The expected numbers.
            strayed: Whether parameters of this rank have changed since they got gradients that were not reduced.
            marks: The reduced marks of all ranks, one element, if a bucket carried them.
        """
        if marks is None:
            # Without a flat last bucket there was no room for the mark, so it needs a call of its own.
            marks = torch.tensor(int(strayed or got != due), device="cpu").to(self._group.device)
            self._group.all_reduce(marks, ReduceOp.MAX)
        if marks.item():
            self._explain(got, due)

    def _explain(self, got: list[int], due: list[int]) -> None:
        """Exchange the details of all ranks, and raise unless everything is correct. All ranks call it.

        Raises:
            UsageError: On any rank, other parameters got gradients than expected.
            MismatchError: The ranks' parameters differ.
        """
        # The details are exchanged only after an error. A correct step does not pay for them.
        mine = torch.tensor([got, due], device="cpu").to(self._group.device)
        everyones = mine.new_empty(self._group.size(), *mine.shape)
        self._group.all_gather(everyones, mine)
        if not torch.equal(everyones[:, 0], everyones[:, 1]):
            raise UsageError(self._complaint(everyones.tolist()))
        require_same_values(list(zip(self._names, self._parameters, strict=True)), self._group)

    def _complaint(self, everyones: list[list[list[int]]]) -> str:
        """Describe which parameters got too few or too many gradients, and on which ranks."""
        problems: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for index, name in enumerate(self._names):
            ranks: dict[str, list[int]] = {}
            for rank, (got, due) in zip(self._group.ranks, everyones, strict=True):
                if got[index] != due[index]:
                    few = f"{got[index]} gradients instead of {due[index]}"
                    if not got[index]:
                        few = "no gradient"
                    elif got[index] < 0:
                        few = _WRONG[got[index]]
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
        if any(_CONVERTED in got for got, _ in everyones):
            remedy = "Convert the model (double(), half(), to(dtype)) before wrapping it, or wrap it again."
        elif any(few < _CONVERTED for got, _ in everyones for few in got):
            remedy = (
                "If an optimizer steps in a hook of a parameter, it uses the gradient of this rank only. Step after "
                "backward(), or attach the optimizer with torch.distributed.optim._apply_optimizer_in_backward "
                "before the first forward, so that it steps after the mean is computed."
            )
        elif self._static:
            remedy = "Omit static_graph=True if backwards differ: with it, every backward must be equal to the first."
        elif any(few == "no gradient" for few, _ in problems):
            remedy = (
                "Every trained parameter must contribute to the loss of every rank: use it, or call "
                "requires_grad_(False) on it before wrapping, or pass find_unused_parameters=True. If several "
                "backwards follow one forward, each through a part of its outputs, add the losses and call backward "
                "once, or pass find_unused_parameters=True."
            )
        else:
            remedy = (
                "If a re-entrant checkpoint uses a parameter twice, pass use_reentrant=False to the checkpoint, or "
                "static_graph=True to the wrapper."
            )
        return (
            f"DistributedDataParallel: backward gave {'; '.join(parts)}. "
            f"The values in .grad are not the mean over the ranks.\n  {remedy}"
        )


def _fills_all_gradients() -> bool:
    """Return whether the backward that ends in this thread adds to the ``.grad`` of all parameters that it reaches.

    ``torch.autograd.grad`` adds to none, and ``backward(inputs=...)`` only to the ``.grad`` of its inputs.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    if frame is None:  # called from C++
        return True
    args, named = frame.f_locals["args"], frame.f_locals["kwargs"]
    inputs = args[3]  # the inputs argument of torch.autograd's call into its engine
    return bool(named["accumulate_grad"]) and not inputs


def _is_nested() -> bool:
    """Return whether another backward called this one, as for a re-entrant checkpoint."""
    # The backward of a GPU runs in a thread of autograd, which Python has not started. Its stack does not show the
    # caller, so the thread counts as one backward.
    backwards = int(isinstance(threading.current_thread(), threading._DummyThread))
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and backwards < 2:
        backwards += frame.f_code.co_name == "_engine_run_backward"  # torch.autograd's call into its engine
        frame = frame.f_back
    return backwards > 1


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the return value of a forward, each once."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no other object gets the same id
    rest = [value]
    while rest:
        item = rest.pop()
        if item is None or isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            yield item
            continue
        if isinstance(item, Mapping):
            rest.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            rest.extend(item)
        elif dataclasses.is_dataclass(item):
            rest.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        rest.extend(getattr(item, "__dict__", {}).values())


# Types that hold no outputs. Walking through a model that a forward returned would take long.
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)

leave_to_python(Reducer)
