"""ProcessGroup.reconfigure: every change of membership, refused arguments, and errors about missing processes."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.handles import pass_on, wait_for

SHORT_S = 3.0
SEEDS = int(os.environ.get("ALLRANKS_TEST_MOMENTS", "4"))


def me() -> int:
    return int(os.environ["RANK"])


def world() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def summed(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([2.0 ** me()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def place() -> tuple[int, int, float]:
    return dist.get_rank(), dist.get_world_size(), summed()


def alone() -> dist.ProcessGroup:
    """Create a world of this process only, like that of a newcomer."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), timeout=20)
    return world()


def error_of(call: Callable[[], object], kind: type[Exception]) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value), time.monotonic() - began


def test_same_ranks_can_be_reordered(tmp_path: Path) -> None:
    def body() -> None:
        group = world()
        handles = pass_on(tmp_path, "first", group.reconfigure_handle(), 3)
        assert group.reconfigure_handle() == handles[me()]
        group.reconfigure(1, handles)
        assert place() == (me(), 3, 7)
        group.reconfigure(2, handles[::-1])
        assert place() == (2 - me(), 3, 7)
        assert group.ranks == (0, 1, 2)
        group.reconfigure(3, set(handles))  # a set is ordered by the ranks at the creation of the handles
        assert place() == (me(), 3, 7)
        message = torch.tensor([float(me())])
        if me() == 0:
            dist.send(message, 2)
        elif me() == 2:
            dist.recv(message, 0)
            assert message.item() == 0

    run_ranks(3, body)


def test_groups_can_shrink_split_merge_and_grow(tmp_path: Path) -> None:
    def body() -> None:
        group = alone()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 4)
        pairs = handles[:2] if me() < 2 else handles[2:]
        group.reconfigure(1, pairs)  # both groups use the same number; neither communicates with the other
        assert place() == (me() % 2, 2, 3 if me() < 2 else 12)
        group.reconfigure(2, handles)
        assert place() == (me(), 4, 15)
        group.reconfigure(3 + me(), [handles[me()]])
        assert place() == (0, 1, 2.0 ** me())
        if me() != 1:
            group.reconfigure(10, handles[:1] + handles[2:])
            assert place() == ((0, -1, 1, 2)[me()], 3, 13)
        group.reconfigure(11, handles)
        assert place() == (me(), 4, 15)
        dist.destroy_process_group()

    run_ranks(4, body, init=False)


def test_new_process_replaces_a_dead_one(tmp_path: Path) -> None:
    def body() -> None:
        group = alone()
        if me() == 3:  # it joins later
            wait_for(tmp_path / "lost.0")
            handles = pass_on(tmp_path, "new", group.reconfigure_handle(), 3, 1)
        else:
            handles = pass_on(tmp_path, "old", group.reconfigure_handle(), 3)
            group.reconfigure(1, handles)
            if me() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(dist.PeerLostError):
                summed()
            pass_on(tmp_path, "lost", "", 1)
            handles = pass_on(tmp_path, "new", handles[me()], 3)
        group.reconfigure(2, handles)
        assert place() == ({0: 0, 3: 1, 2: 2}[me()], 3, 13)
        dist.destroy_process_group()

    run_ranks(4, body, init=False, may_die=(1,))


def test_shrink_and_agree_work_after_reconfigure(tmp_path: Path) -> None:
    """Shrink and agree on the store of the launcher. A loss during an agreement never splits the group."""

    def body() -> tuple[int, int, int, float] | None:
        group = world()
        handles = pass_on(tmp_path, "first", group.reconfigure_handle(), 4)
        group.reconfigure(1, [handles[rank] for rank in (3, 1, 0, 2)])
        assert group.agree(5 + me()) == 5
        if me() == 1:  # its new rank is 1, too
            time.sleep(0.3)  # the others are in the agreement then
            os.kill(os.getpid(), signal.SIGKILL)
        agreed = group.agree(5 + me())
        smaller = group.shrink()
        tensor = torch.tensor([2.0 ** me()])
        smaller.all_reduce(tensor)
        assert smaller.agree(7) == 7
        return agreed, smaller.rank(), smaller.size(), tensor.item()

    found = run_ranks(4, body, may_die=(1,))
    assert [found[rank] for rank in (3, 0, 2)] == [(5, place, 3, 13.0) for place in range(3)]


def test_shrink_without_a_common_store_raises_usage_error(tmp_path: Path) -> None:
    def body() -> None:
        group = alone()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        group.reconfigure(1, handles)
        for call in (group.shrink, lambda: group.shrink([0])):
            text, _ = error_of(call, dist.UsageError)
            assert "have no store in common" in text
            assert "Call reconfigure with the handles of the remaining processes" in text

    run_ranks(2, body, init=False)


def test_group_works_again_after_an_abort_or_a_timeout(tmp_path: Path) -> None:
    def body() -> None:
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        pending = dist.all_reduce(torch.ones(1), async_op=True) if me() == 0 else None
        if me() == 1:
            group.abort()
        if pending is not None:
            with pytest.raises(dist.AbortedError):
                pending.wait()
        group.reconfigure(1, handles)
        assert place() == (me(), 2, 3)
        if me() == 0:
            with pytest.raises(dist.TimeoutError):
                group.monitored_barrier(timeout=0.2)
        group.reconfigure(2, handles)
        assert place() == (me(), 2, 3)
        late = dist.all_reduce(torch.ones(1), async_op=True) if me() == 0 else None
        group.reconfigure(3, handles)
        if late is not None:  # a work of a call that the other rank never makes
            with pytest.raises(dist.AllranksError):
                late.wait()
        assert place() == (me(), 2, 3)

    run_ranks(2, body)


def test_disagreeing_handles_are_reported_before_the_timeout(tmp_path: Path) -> None:
    """Raise long before the timeout, and leave the group unchanged."""

    def body() -> list[tuple[str, float]]:
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        asked = (handles, handles[:2], handles)[me()], (handles, handles[::-1], handles)[me()]
        found = [
            error_of(lambda n=n, h=h: group.reconfigure(n, h, timeout=20), dist.MismatchError)  # type: ignore[misc]
            for n, h in enumerate(asked)
        ]
        assert place() == (me(), 3, 7)
        return found

    zero, one, _ = run_ranks(3, body)
    assert zero is not None
    assert one is not None
    assert "rank 1" in zero[0][0]
    assert "2 handles, but this rank with 3" in zero[0][0]
    assert "3 handles, but this rank with 2" in one[0][0]
    assert "in another order" in zero[1][0]
    assert max(seconds for found in (zero, one) for _, seconds in found) < 10


def test_dead_process_is_named_before_the_timeout(tmp_path: Path) -> None:
    def body() -> str | None:
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        if me() == 2:
            pass_on(tmp_path, "pid", str(os.getpid()), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        pid = wait_for(tmp_path / "pid.2")
        text, _ = error_of(lambda: group.reconfigure(1, handles, timeout=20), dist.JoinError)
        assert f"pid {pid}" in text
        dead_first = error_of(lambda: group.reconfigure(2, handles[::-1], timeout=20), dist.JoinError)
        assert f"rank 0 (host {os.uname().nodename}, pid {pid}) is gone" in dead_first[0]
        group.reconfigure(3, handles[:2])
        assert place() == (me(), 2, 3)
        return text

    for found in run_ranks(3, body, may_die=(2,))[:2]:
        assert found is not None
        assert "rank 2" in found
        assert "is gone" in found


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_process_is_named_at_the_timeout(tmp_path: Path, stopped: int) -> None:
    """Wait until the timeout, because a stopped process can still answer."""

    def body() -> None:
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        pass_on(tmp_path, "pid", str(os.getpid()), 3)
        pid = int(wait_for(tmp_path / f"pid.{stopped}"))
        if me() == stopped:
            os.kill(pid, signal.SIGSTOP)
        else:
            with pytest.raises(dist.JoinError, match=rf"(?s)rank {stopped} .*pid {pid}"):
                group.reconfigure(1, handles, timeout=SHORT_S)
            pass_on(tmp_path, "seen", "", 0)
        if me() == 2:
            wait_for(tmp_path / f"seen.{1 - stopped}")
            os.kill(pid, signal.SIGCONT)
        group.reconfigure(2, handles)
        assert place() == (me(), 3, 7)

    run_ranks(3, body)


def test_what_is_refused(tmp_path: Path) -> None:
    def body() -> None:
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        mine = handles[me()]
        group.reconfigure(5 + me(), [mine])
        for uuid, given, words in (
            (5 + me(), [mine], "already used"),
            (7, [mine, mine], "unique"),
            (7, [], "handles is empty"),
            (7, [handles[1 - me()]], "not among the 1"),
            (7, [mine, "rubbish"], "'rubbish' is not a handle"),
            (7, [mine, mine[:-9]], "is not a handle"),
            (7, [mine, 3], "3 is not a handle"),
            (7, mine, "a list"),
            ("7", [mine], "whole number"),
        ):
            with pytest.raises(dist.UsageError, match=words):
                group.reconfigure(uuid, given)  # type: ignore[arg-type]
        group.reconfigure(7, handles)  # the refused calls have not used the number
        assert place() == (me(), 2, 3)

    run_ranks(2, body)


def test_groups_on_other_engines_do_not_mix(tmp_path: Path) -> None:
    def body() -> None:
        backend = ("native", "tcp")[me()]
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        with pytest.raises(dist.MismatchError, match=f"rank {1 - me()} has a group with another engine"):
            group.reconfigure(1, handles)
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_other_engines(tmp_path: Path, backend: str) -> None:
    def body() -> None:
        dist.init_process_group(backend)
        group = world()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        group.reconfigure(1, handles[::-1])
        assert place() == (2 - me(), 3, 7)
        if me():
            group.reconfigure(2, handles[1:])
            assert place() == (me() - 1, 2, 6)
        dist.destroy_process_group()

    run_ranks(3, body, init=False)


def test_group_of_some_ranks_keeps_their_world_ranks(tmp_path: Path) -> None:
    """Check that the members keep their world ranks, and that the world is unchanged."""

    def body() -> None:
        group = dist.new_group([0, 2, 3])
        if me() != 1:
            numbers = {0: 0, 2: 1, 3: 2}
            handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3, numbers[me()])
            if me():
                group.reconfigure(1, handles[:0:-1])
                assert (group.rank(), group.size(), group.ranks) == (3 - me(), 2, (3, 2))
                tensor = torch.tensor([float(me())])
                dist.broadcast(tensor, 3, group=group)
                assert tensor.item() == 3
        assert summed() == 15

    run_ranks(4, body)


def test_concurrent_reconfigure_is_refused_and_leaks_no_threads(tmp_path: Path) -> None:
    def body() -> None:
        group = world()
        threads = threading.active_count()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        refused: list[str] = []

        def second() -> None:
            try:
                group.reconfigure(2, handles)
            except dist.UsageError as error:
                refused.append(str(error))

        if me() == 0:
            other = threading.Thread(target=group.reconfigure, args=(1, handles))
            other.start()
            time.sleep(0.2)
            second()
            pass_on(tmp_path, "tried", "", 0)
            other.join()
            assert "another thread is already reconfiguring" in refused[0]
        else:
            wait_for(tmp_path / "tried.0")
            group.reconfigure(1, handles)
        assert place() == (me(), 2, 3)
        dist.destroy_process_group()
        assert threading.active_count() <= threads
        with pytest.raises(dist.NotInitializedError):
            group.reconfigure(9, handles)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(2, body)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_survivors_continue_after_deaths_at_random_times(tmp_path: Path, seed: int) -> None:
    """Kill processes at random times. ALLRANKS_TEST_MOMENTS sets the number of seeds."""
    size = 5
    pick = random.Random(seed)
    victims = pick.sample(range(size), size - 2)
    delays = [pick.uniform(0, 0.012) for _ in victims]

    def body() -> float:
        group = alone()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), size)
        here, longest = list(range(size)), 0.0
        for i, (victim, delay) in enumerate(zip(victims, delays, strict=True)):
            began = time.monotonic()
            if me() == victim:
                threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            try:
                group.reconfigure(2 * i, [handles[r] for r in here], timeout=20)
            except dist.AllranksError:
                longest = max(longest, time.monotonic() - began)
            if me() == victim:
                signal.pause()
            here.remove(victim)
            (tmp_path / f"done {i}.{me()}").touch()
            for rank in here:
                wait_for(tmp_path / f"done {i}.{rank}")
            group.reconfigure(2 * i + 1, [handles[r] for r in here], timeout=20)
            assert place() == (here.index(me()), len(here), sum(2.0**r for r in here))
        dist.destroy_process_group()
        return longest

    found = run_ranks(size, body, init=False, may_die=victims, timeout_s=90)
    assert max(seconds for seconds in found if seconds is not None) < 10
