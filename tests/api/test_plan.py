"""Plans: results compared with torch, mixed with ordinary calls of other ranks, and after the group is closed."""

import copy
import os
import pickle
import signal

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
COUNTS = (0, 1, 13, 1000, 300_001)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def operand(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 13) % 101).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_reduce(ranks: int) -> None:
    def body() -> None:
        for dtype in DTYPES:
            for count in COUNTS:
                tensor = torch.empty(count, dtype=dtype)
                plan = group().plan("all_reduce", tensor, op=dist.ReduceOp.SUM)
                right = torch.stack([operand(r, count, dtype) for r in range(ranks)]).sum(0).to(dtype)
                for turn in range(4):
                    tensor.copy_(operand(dist.get_rank(), count, dtype))
                    if turn % 2 == dist.get_rank() % 2:
                        plan()
                    else:
                        dist.all_reduce(tensor)  # to the other ranks, the same call as plan()
                    assert torch.equal(tensor, right)
                    tensor.copy_(operand(dist.get_rank(), count, dtype))
                    work = plan(async_op=True)
                    work.wait()
                    assert torch.equal(tensor, right)
                    assert work.result()[0] is tensor

    run_ranks(ranks, body)


def test_plan_of_every_verb_equals_the_ordinary_call() -> None:
    def body() -> None:
        rank, ranks, n = dist.get_rank(), dist.get_world_size(), 5
        mine, whole = operand(rank, n), torch.cat([operand(r, n) for r in range(ranks)])
        one = torch.empty(n)
        all_of = torch.empty(ranks * n)
        listed = [torch.empty(n) for _ in range(ranks)]
        of_root = [torch.empty(n) for _ in range(ranks)]
        from_root = [operand(r, n) for r in range(ranks)]
        exchanged = torch.cat([operand(r, n * ranks)[rank * n : (rank + 1) * n] for r in range(ranks)])
        given = operand(rank, n * ranks)
        total = torch.stack([operand(r, n * ranks) for r in range(ranks)]).sum(0)
        reduced = torch.stack([operand(r, n) for r in range(ranks)]).sum(0)
        root = rank == 1
        plans = {
            "reduce": (("reduce", one, 1), lambda: one, reduced if root else mine),
            "broadcast": (("broadcast", one), lambda: one, operand(1, n)),
            "all_gather": (("all_gather", all_of, mine), lambda: all_of, whole),
            "listed": (("all_gather", listed, mine), lambda: torch.cat(listed), whole),
            "gather": (
                ("gather", mine, of_root if root else None, 1),
                lambda: torch.cat(of_root),
                whole if root else torch.zeros(ranks * n),
            ),
            "scatter": (("scatter", one, from_root if root else None, 1), lambda: one, operand(rank, n)),
            "reduce_scatter": (("reduce_scatter", one, given), lambda: one, total[rank * n : (rank + 1) * n]),
            "all_to_all": (
                ("all_to_all", list(all_of.chunk(ranks)), list(given.chunk(ranks))),
                lambda: all_of,
                exchanged,
            ),
            "all_to_all_single": (("all_to_all_single", all_of, given), lambda: all_of, exchanged),
            "split": (
                ("all_to_all_single", all_of, given, [n] * ranks, [n] * ranks),
                lambda: all_of,
                exchanged,
            ),
            "barrier": (("barrier",), lambda: one, mine),
        }
        for name, (arguments, result, right) in plans.items():
            named = {"src": 1} if name == "broadcast" else {}
            plan = group().plan(*arguments, **named)
            assert plan.verb == arguments[0]
            for async_op in (False, True, False):
                for tensor in (one, all_of, *listed, *of_root):
                    tensor.zero_()
                one.copy_(mine)
                work = plan(async_op=async_op)
                assert (work is None) is not async_op
                if work is not None:
                    work.wait()
                assert torch.equal(result(), right), (name, async_op)

    run_ranks(2, body)
    run_ranks(3, body)


def test_plan_accepts_tensors_that_the_core_cannot_read_directly() -> None:
    """Make the ordinary call for tensors that the core cannot read directly."""

    def body() -> None:
        ranks = dist.get_world_size()
        columns = torch.ones(4, 6).t()
        plan = group().plan("all_reduce", columns)
        plan()
        assert torch.equal(columns, torch.full((6, 4), float(ranks)))
        sparse = torch.eye(3).to_sparse()
        plan = group().plan("all_reduce", sparse)
        plan()
        assert torch.equal(sparse.to_dense(), ranks * torch.eye(3))
        factor = group().plan("all_reduce", one := torch.ones(2), op=dist.premul_sum(0.5))
        factor()
        assert torch.equal(one, torch.full((2,), ranks / 2))
        conjugate = torch.tensor([1 + 2j]).conj()
        group().plan("all_reduce", conjugate)()
        assert conjugate.resolve_conj().item() == ranks * (1 - 2j)

        # The program may change its list. The plan keeps the tensors from its creation.
        listed = [torch.empty(1) for _ in range(ranks)]
        kept = [*listed]
        gather = group().plan("all_gather", listed, torch.tensor([float(dist.get_rank())]))
        listed.clear()
        gather()
        assert [each.item() for each in kept] == [float(r) for r in range(ranks)]

    run_ranks(2, body)


def test_plan_follows_a_tensor_whose_memory_changes() -> None:
    def body() -> None:
        tensor = torch.ones(4)
        plan = group().plan("all_reduce", tensor)
        plan()
        tensor.data = torch.full((100_000,), 3.0)
        plan()
        assert torch.equal(tensor, torch.full((100_000,), 6.0))
        tensor.resize_(200_000).fill_(1.0)
        plan()
        assert torch.equal(tensor, torch.full((200_000,), 2.0))
        tensor.data = torch.ones(3, dtype=torch.int32)
        plan()
        assert torch.equal(tensor, torch.full((3,), 2, dtype=torch.int32))
        tensor.data = torch.ones(3, 2).t()
        plan()
        assert torch.equal(tensor, torch.full((2, 3), 2.0))

    run_ranks(2, body)


def test_wrong_arguments() -> None:
    def body() -> None:
        tensor = torch.ones(2)
        with pytest.raises(dist.UsageError, match=r"'send' cannot be planned\. Expected one of all_reduce, reduce,"):
            group().plan("send", tensor, 1)
        with pytest.raises(dist.UsageError, match=r"plan\(async_op=True\)"):
            group().plan("all_reduce", tensor, async_op=True)
        with pytest.raises(TypeError, match="root"):
            group().plan("all_reduce", tensor, root=0)
        # Each execution of the plan raises the same error as the ordinary call.
        for arguments in (("broadcast", tensor, 2), ("all_gather", torch.empty(3), tensor), ("all_reduce", "tensor")):
            plan = group().plan(*arguments)
            with pytest.raises((dist.UsageError, TypeError)) as ordinary:
                getattr(group(), arguments[0])(*arguments[1:])
            for _ in range(2):
                with pytest.raises(ordinary.type) as planned:
                    plan()
                assert str(planned.value) == str(ordinary.value)
        plan = group().plan("all_reduce", tensor)
        assert repr(plan) == f"<Plan: all_reduce on group {group().name!r}>"
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to its group"):
                copied(plan)

    run_ranks(2, body)


def test_mismatch_of_a_plan_names_the_call_site() -> None:
    """Name the call site as an ordinary call does. The group stays usable."""

    def body() -> None:
        tensor = torch.ones(2 + dist.get_rank())
        plan = group().plan("all_reduce", tensor)
        for _ in range(2):
            with pytest.raises(dist.MismatchError, match=r"(?s)all_reduce.*test_plan\.py"):
                plan()
        same = group().plan("all_reduce", tensor[:2])
        same()
        assert tensor[0].item() == 2

    run_ranks(2, body)


def test_plan_of_a_destroyed_group_raises() -> None:
    def body() -> None:
        made = dist.new_group()
        tensor = torch.ones(1)
        plan = made.plan("all_reduce", tensor)
        plan()
        dist.destroy_process_group(made)
        with pytest.raises(dist.NotInitializedError) as ordinary:
            made.all_reduce(tensor)
        for async_op in (False, True):
            with pytest.raises(dist.NotInitializedError) as planned:
                plan(async_op=async_op)
            assert str(planned.value) == str(ordinary.value)
        with pytest.raises(dist.NotInitializedError):
            made.plan("all_reduce", tensor)()

    run_ranks(2, body)


def test_plan_of_a_shrunk_group_raises() -> None:
    """Check that the old plan raises the error of the old group, and that the new group accepts plans."""

    def body() -> float:
        old = dist.new_group()
        tensor = torch.ones(1)
        plan = old.plan("all_reduce", tensor)
        plan()
        if dist.get_rank() == 2:
            return 0.0
        made = old.shrink([2])
        with pytest.raises(dist.NotInitializedError):
            plan()
        tensor.fill_(1)
        made.plan("all_reduce", tensor)()
        return tensor.item()

    assert run_ranks(3, body) == [2.0, 2.0, 0.0]


def test_plan_follows_its_group_after_reconfigure() -> None:
    """Check that a plan continues to work with the new members."""

    def body() -> None:
        made = dist.new_group()
        tensor = torch.ones(1)
        plan = made.plan("all_reduce", tensor)
        handles = [""] * 2
        dist.all_gather_object(handles, made.reconfigure_handle())
        made.reconfigure(7, handles)
        plan()
        assert tensor.item() == 2
        dist.destroy_process_group(made)

    run_ranks(2, body)


def test_plan_names_a_lost_rank() -> None:
    def body() -> None:
        tensor = torch.ones(1)
        plan = group().plan("all_reduce", tensor)
        plan()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            plan()

    run_ranks(2, body, may_die=[1])


def test_plan_raises_in_a_forked_child() -> None:
    def body() -> None:
        plan = group().plan("all_reduce", torch.ones(1))
        child = os.fork()
        if child == 0:
            try:
                plan()
            except dist.NotInitializedError as error:
                os._exit(0 if "belongs to the parent process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        plan()

    run_ranks(2, body)


def test_other_engines() -> None:
    """Check that a plan of another engine makes the ordinary call."""

    def body() -> None:
        made = dist.new_group(backend="gloo")
        tensor = torch.ones(3)
        plan = made.plan("all_reduce", tensor)
        plan()
        plan(async_op=True).wait()
        assert torch.equal(tensor, torch.full((3,), 4.0))

    run_ranks(2, body)


def test_calls_of_a_plan_are_recorded() -> None:
    """Check that the trace contains the calls of a plan."""

    def body() -> None:
        tensor = torch.ones(3)
        plan = group().plan("all_reduce", tensor)
        before = group().stats().calls
        for _ in range(5):
            plan()
        assert group().stats().calls == before + 5
        last = [call for call in dist.trace.last_calls() if call.verb == "all_reduce"][-5:]
        assert [call.count for call in last] == [3] * 5

    run_ranks(2, body)
