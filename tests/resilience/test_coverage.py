"""State: what it covers, what it refuses in the first steps, and where it commits a step.

Ranks die without a replacement. test_random_programs.py and test_elastic.py replace ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import allranks as dist
from allranks._call.digests import digest
from allranks._elastic.training import variables
from allranks._elastic.training.handover import assign
from allranks.testing import run_ranks


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _refused(program: Callable[[], None], *words: str) -> None:
    """Check that the program raises on every rank, with these words in the error."""

    def main() -> str:
        with pytest.raises(dist.UsageError) as caught:
            program()
        return str(caught.value)

    for text in run_ranks(2, main, may_die=[1]):
        for word in words:
            assert word in text, text


def _net() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


class _Meter:
    def __init__(self) -> None:
        self.total = 0.0


def test_changed_list_outside_the_state_is_refused_with_the_line_to_add() -> None:
    def program() -> None:
        losses: list[float] = []
        for step in dist.resilience.State().steps(4):
            with step:
                losses.append(float(step.index))

    _refused(program, "losses (a list) is changed", "State(losses=losses, ...)", 'State(local=["losses"])')


def test_values_declared_as_local_are_not_refused() -> None:
    def program() -> int:
        losses: list[float] = []
        meter = _Meter()
        for step in dist.resilience.State(local=["losses", meter]).steps(4):
            with step:
                losses.append(float(step.index))
                meter.total += 1
        return len(losses)

    assert run_ranks(2, program, may_die=[1]) == [4, 4]


def test_part_that_is_too_large_to_be_observed_is_announced() -> None:
    def program() -> list[str]:
        replay = deque([float(number)] for number in range(10_001))
        losses = [0.0] * 10_001
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in dist.resilience.State(replay=replay, losses=losses).steps(4):
                with step:
                    losses.append(1.0)
                    replay.append([2.0])
        return [str(each.message) for each in caught]

    (text,), *others = run_ranks(2, program)
    assert "State: replay: too large to be observed" in text
    assert others == [[]]


def test_changed_object_optimizer_and_iterator_outside_the_state_are_refused() -> None:
    def of_object() -> None:
        meter = _Meter()
        for step in dist.resilience.State().steps(4):
            with step:
                meter.total += 1

    def of_optimizer() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in dist.resilience.State(net=net).steps(4):
            with step:
                net(torch.ones(2, 3)).sum().backward()
                optimizer.step()

    def of_iterator() -> None:
        more = iter([1, 2, 3, 4, 5, 6])
        for step in dist.resilience.State().steps(4):
            with step:
                next(more)

    _refused(of_object, "meter (a _Meter", "total", "State(meter=meter, ...)")
    _refused(of_optimizer, "State(optimizer=optimizer, ...)")
    _refused(of_iterator, "more is an iterator", "State.steps(), as zip(loader, other)")


def test_counters_around_the_steps_and_nested_loops_are_refused() -> None:
    def counts() -> None:
        for number, step in enumerate(dist.resilience.State().steps(4)):
            with step:
                torch.ones(number)

    def nested() -> None:
        state = dist.resilience.State()
        for step in state.steps(4):
            with step:
                for _ in state.steps(2):
                    pass

    def epochs_in_epochs() -> None:
        state = dist.resilience.State()
        for _ in state.epochs(2):
            for _ in state.epochs(2):
                pass

    _refused(counts, "number is counted by the loop", "use step.index instead")
    _refused(nested, "called within a step")
    _refused(epochs_in_epochs, "within another loop of epochs")


def test_parameters_that_differ_between_ranks_are_refused() -> None:
    def program() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in dist.resilience.State(net=net, optimizer=optimizer).steps(4):
            with step:
                net(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
                optimizer.step()

    _refused(program, "net.weight differs between ranks", "Average gradients before the optimizer runs")


@pytest.mark.parametrize("moment", ["first", "between", "after"])
def test_a_step_with_two_optimizers_is_undone_as_a_whole(moment: str) -> None:
    def main() -> Any:
        nets = [_net(), _net()]
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
        state = dist.resilience.State(a=nets[0], b=nets[1], c=optimizers[0], d=optimizers[1])
        doomed = dist.get_rank() == 1
        for step in state.steps(8):
            with step:
                dies = doomed and step.index == 5
                for net, optimizer, place in zip(nets, optimizers, ("first", "between"), strict=True):
                    if dies and moment == place:
                        _die()
                    optimizer.zero_grad()
                    net(torch.ones(2, 3)).sum().backward()
                    for parameter in net.parameters():
                        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                    optimizer.step()
                if dies and moment == "after":
                    _die()
        return [p.tolist() for net in nets for p in net.parameters()], state.steps_done

    results = run_ranks(3, main, may_die=[1])
    calm = run_ranks(1, main)
    assert results[0] == results[2] == calm[0]  # the gradients are equal on all ranks, so one rank has the same result


def test_step_is_undone_even_if_the_program_catches_the_error() -> None:
    def main() -> Any:
        weight, caught = torch.zeros(1), 0
        state = dist.resilience.State(weight=weight, local=["caught"])
        for step in state.steps(6):
            with step:
                if dist.get_rank() == 1 and dist.get_world_size() == 3 and step.index == 4:
                    _die()
                try:
                    dist.barrier()
                except RuntimeError:
                    caught += 1
                step.commit()
                weight += 1
        return weight.item(), state.steps_done, caught

    results = run_ranks(3, main, may_die=[1])
    assert results[0][:2] == results[2][:2] == (6.0, 6)
    assert results[0][2] + results[2][2] > 0


def test_variables_of_the_loop_and_the_batch_are_restored() -> None:
    def main() -> Any:
        data = torch.arange(16.0).view(8, 2)
        count, total, state = 0, torch.zeros(1), dist.resilience.State()
        for step in state.steps(DataLoader(data, batch_size=1)):  # type: ignore[arg-type]
            with step:
                count += 1
                total = total + step.batch.mul_(2).sum()
                if dist.get_rank() == 1 and dist.get_world_size() == 3 and step.index == 5:
                    _die()
                dist.barrier()
        return count, total.item()

    results = run_ranks(3, main, may_die=[1])
    assert results[0] == results[2] == (8, 2.0 * sum(range(16)))


def test_variable_that_begins_to_differ_between_ranks_is_stored_on_the_backup_rank() -> None:
    def main() -> tuple[float, bool]:
        fastest, state = 100.0, dist.resilience.State()
        for _ in range(3):
            for step in state.steps(20):  # the first steps detect that all ranks have the same value
                with step:
                    pass
            fastest = min(fastest, 10.0 + dist.get_rank())
        kept = any(name.endswith(".fastest") for plan in state._plans.values() for name in plan.variables)
        return fastest, kept

    assert run_ranks(2, main, may_die=[1]) == [(10.0, True), (11.0, True)]


@pytest.mark.parametrize("source", ["list", "views"])
def test_changed_batch_that_the_source_returns_again_is_restored_or_refused(source: str) -> None:
    """Undo a step that has changed its batch in place.

    Batches in a list are copied. If another iterable returns the changed memory again, State raises an error.
    """

    class Views:
        def __init__(self, data: torch.Tensor) -> None:
            self.data = data

        def __iter__(self) -> Any:
            return iter(self.data)

    def main() -> list[float]:
        data = torch.arange(1.0, 7.0).view(6, 1)
        batches = list(data) if source == "list" else Views(data)
        total = torch.zeros(1)
        state = dist.resilience.State(total=total, local=["data", "batches"])

        def train() -> None:
            for step in state.steps(batches):
                with step:
                    step.batch.mul_(10)
                    if step.index == 3 and dist.get_rank() == 2:
                        _die()
                    dist.all_reduce(step.batch.clone())
                    total.add_(step.batch)

        if source == "views":
            with pytest.raises(dist.StateLostError, match="Views returns the same memory again"):
                train()
        else:
            train()
        return total.tolist()

    results = run_ranks(3, main, may_die=[2])
    assert source == "views" or results == [[210.0], [210.0], None]


def test_leaving_the_loop_after_an_undone_step_raises() -> None:
    def main() -> str:
        state, left = dist.resilience.State(), False
        for step in state.steps(8):
            with step:
                left = step.index == 5
                if left and dist.get_rank() == 1:
                    _die()
                dist.barrier()
            if left:
                break
        with pytest.raises(dist.StateLostError, match="has left the loop after a step that a loss has undone"):
            for _ in state.steps(1):
                pass
        return "refused"

    results = run_ranks(3, main, may_die=[1])
    assert results[0] == results[2] == "refused"


def test_second_loop_of_epochs_continues_after_the_first_one() -> None:
    def main() -> Any:
        state, seen = dist.resilience.State(local=["seen"]), []
        for last in (2, 5):
            for epoch in state.epochs(last):
                for step in state.steps(2):
                    with step:
                        if dist.get_rank() == 1 and dist.get_world_size() == 3 and (epoch, step.index) == (3, 1):
                            _die()
                        dist.barrier()
                    if step.committed:
                        seen.append((epoch, step.index))
        return seen, state.steps_done

    results = run_ranks(3, main, may_die=[1])
    assert results[0] == results[2] == ([(epoch, index) for epoch in range(5) for index in range(2)], 10)


def _loop(frames: list[Any]) -> None:
    total, best, last = 0, None, 0
    for _ in range(2):
        fresh = 1
        for _ in _Once(frames):
            last = fresh
            total += last
        best = total if best is None else min(best, total)
    print(best)


class _Once:
    """Iterable that yields once and records which variables the loop of its caller carries."""

    def __init__(self, frames: list[Any]) -> None:
        self._frames = frames

    def __iter__(self) -> Any:
        self._frames.append(variables.carried(sys._getframe(1)))
        yield 0


def test_a_variable_is_carried_if_it_is_read_before_it_is_assigned() -> None:
    found: list[variables.Carried] = []
    _loop(found)
    assert {"total", "best"} <= found[0].assigned
    assert "last" not in found[0].assigned


def test_assign_changes_the_existing_objects_in_place() -> None:
    tensor, inner = torch.zeros(2), [1, 2]
    part = {
        "tensor": tensor,
        "inner": inner,
        "counts": Counter(a=1),
        "last": deque([1], maxlen=2),
        "array": np.zeros(2),
    }
    array = part["array"]
    new = {"tensor": torch.ones(2), "inner": [3], "counts": Counter(b=2), "last": deque([5, 6], maxlen=2), "more": 1}
    assert assign(part, {**new, "array": np.ones(2)}) is part
    assert part["tensor"] is tensor
    assert tensor.tolist() == [1.0, 1.0]
    assert part["inner"] is inner
    assert inner == [3]
    assert part["array"] is array
    assert array.tolist() == [1.0, 1.0]  # type: ignore[attr-defined]
    assert part["counts"] == Counter(b=2)
    assert part["last"] == deque([5, 6])


def test_digests_of_large_sparse_tensors_depend_on_every_element() -> None:
    """Compare tensors with more than 1,000 elements, of which torch's text representation omits some."""
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        index, values = torch.arange(2000)[None], torch.randn(2000)
        order, other = torch.randperm(2000), values.clone()
        other[1000] += 1
        sparse = torch.sparse_coo_tensor(index, values, (5000,))
        assert digest(sparse) == digest(torch.sparse_coo_tensor(index[:, order], values[order], (5000,)))
        assert digest(sparse) != digest(torch.sparse_coo_tensor(index, other, (5000,)))


def test_digests_depend_on_the_value_and_not_on_the_object() -> None:
    point = namedtuple("point", "a b")
    assert digest({"a": [1.0, torch.ones(2)]}) == digest({"a": [1.0, torch.ones(2)]})
    values = [1, 1.0, True, "1", [1], (1,), {1: 1}, torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, 1)]
    values += [np.ones(1), defaultdict(int, {1: 2}), point(1, 2), None, float("nan")]
    assert len({digest(value) for value in values}) == len(values)
