"""Killed, stopped, interrupted and late ranks: every surviving rank gets an error that names them."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.marked import wait_for
from support.prompt import PROMPT_S


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [1, 10_000_000])
def test_a_killed_rank_is_named_by_every_survivor(asynchronous: bool, count: int, tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def kill() -> None:
        killed.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def body() -> tuple[float, float, str]:
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            began = time.monotonic()
            # Another thread kills the process, so that a large call is interrupted in the middle.
            threading.Timer(0.02, kill).start()
            while True:
                dist.all_reduce(tensor)
                if count == 1 and time.monotonic() - began > 0.01:
                    time.sleep(10)

        def forever() -> None:
            while True:
                work = dist.all_reduce(tensor, async_op=asynchronous)
                if work is not None:
                    work.wait()

        with pytest.raises(dist.PeerLostError) as caught:
            forever()
        ended = time.monotonic()
        assert caught.value.rank == 1
        with pytest.raises(dist.PeerLostError, match="rank 1"):  # every later call raises, too
            dist.barrier()
        return ended - float(killed.read_text()), time.monotonic() - ended, str(caught.value)

    results = run_ranks(3, body, may_die={1})
    assert results[1] is None
    for result in (results[0], results[2]):
        noticed_s, again_s, text = result
        assert noticed_s < PROMPT_S
        assert again_s < PROMPT_S
        assert "rank 1" in text
        assert "died" in text


def test_rank_that_left_the_group_is_named_in_the_error() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            return ""
        with pytest.raises(dist.PeerLostError, match=r"rank 1 .* has left the group") as caught:
            dist.barrier()
        return str(caught.value)

    assert "had not called any collective" in run_ranks(2, body)[0]


@pytest.mark.parametrize("made", [False, True], ids=["world", "group"])
def test_a_child_that_holds_the_sockets_does_not_hide_a_death(made: bool, tmp_path: Path) -> None:
    """Kill a rank whose forked child and grandchild outlive it, as the workers of a data loader do."""

    def body() -> None:
        group = dist.new_group() if made else None
        dist.barrier(group)
        if dist.get_rank() == 1:
            if (child := os.fork()) == 0:
                os.setpgid(0, 0)
                os.fork()
                time.sleep(60)
                os._exit(0)
            os.setpgid(child, child)  # whichever of the two is first
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            dist.barrier(group)
        os.killpg(int((tmp_path / "child").read_text()), signal.SIGKILL)  # an error if they have exited

    run_ranks(2, body, may_die={1})


def test_died_rank_is_reported_although_a_later_rank_has_left() -> None:
    def body() -> None:
        group = dist.new_group()
        dist.barrier(group)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 2:
            dist.destroy_process_group(group)
            return
        while group.failed_ranks() != [1, 2]:
            time.sleep(0.01)
        with pytest.raises(dist.PeerLostError, match=r"rank 1 .* died"):
            dist.recv(torch.empty(1), group=group)

    run_ranks(3, body, may_die={1})


def test_rank_that_leaves_one_group_stays_in_its_other_groups() -> None:
    def body() -> None:
        left, unused, kept = dist.new_group(), dist.new_group(), dist.new_group()
        dist.barrier(left)
        if dist.get_rank() == 2:
            time.sleep(0.3)  # the other ranks sleep in their calls by then
            dist.destroy_process_group(left)
            dist.destroy_process_group(unused)
            dist.barrier(kept)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError, match=r"rank 2 .* has left the group"):
            dist.barrier(left)
        dist.barrier(kept)
        for group in (kept, None):
            with pytest.raises(dist.PeerLostError, match=r"rank 2 .* died"):
                dist.barrier(group)
        with pytest.raises(dist.PeerLostError, match=r"rank 2 .* has left the group"):
            dist.barrier(unused)

    run_ranks(4, body, may_die={2})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_death_is_noticed_after_the_group_s_parent_is_closed(asynchronous: bool) -> None:
    def body() -> float:
        def wait(work: dist.Work | None) -> None:
            if work is not None:
                work.wait()

        parent = dist.new_group()
        group = dist.split_group(parent, [[0, 2, 3]])
        if group is None:
            dist.destroy_process_group(parent)
            return 0.0
        if dist.get_rank() == 0:
            dist.barrier(group)  # the peers have closed the parent, this rank has not
            dist.destroy_process_group(parent)
        else:
            dist.destroy_process_group(parent)
            dist.barrier(group)
        for _ in range(3):
            dist.barrier(group)
        if dist.get_rank() == 2:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(dist.PeerLostError, match=r"rank 1 .* died"):  # rank 2 of the world is rank 1 of the group
            wait(dist.barrier(group, async_op=asynchronous))
        return time.monotonic() - began

    for waited in run_ranks(4, body, may_die={2}):
        assert waited is None or waited < 1.3


def test_rank_that_cannot_create_a_group_does_not_block_other_ranks() -> None:
    def body() -> str:
        dist.new_group()
        if dist.get_rank() == 1:
            with open("/proc/self/statm") as file:
                mapped = int(file.read().split()[0]) * resource.getpagesize()
            # Enough for one shared memory segment, but not for the segments of all ranks.
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (9 << 20), -1))
        try:
            with pytest.raises(dist.JoinError) as caught:
                dist.new_group()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        dist.barrier()
        return str(caught.value)

    first, second, third, fourth = run_ranks(4, body)
    assert "mmap" in second
    for text in (first, third, fourth):
        assert "another rank" in text


def test_late_rank_is_named_when_the_timeout_expires() -> None:
    def body() -> str:
        dist.destroy_process_group()
        dist.init_process_group(timeout=0.5)
        if dist.get_rank() == 2:
            time.sleep(1.2)
            with pytest.raises(dist.AllranksError):
                dist.barrier()
            return ""
        with pytest.raises(dist.TimeoutError) as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)

    for text in run_ranks(3, body)[:2]:
        assert "rank 2 (" in text
        assert "init_process_group(timeout=...)" in text


def test_stopped_rank_is_not_reported_as_dead() -> None:
    def body() -> float:
        pid = os.getpid()
        if dist.get_rank() == 1:
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import os,time; time.sleep(0.1); os.kill({pid}, 19); time.sleep(1); os.kill({pid}, 18)",
                ]
            )
        tensor = torch.ones(100)
        end = time.monotonic() + 1.5
        running = torch.ones(1)
        while running.item():
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            running.fill_(time.monotonic() < end)
            dist.all_reduce(running, dist.ReduceOp.MIN)
        return tensor[0].item()

    assert run_ranks(2, body) == [1.0, 1.0]


def test_ctrl_c_interrupts_a_blocked_call_and_is_reported_to_the_peer(tmp_path: Path) -> None:
    def body() -> str:
        dist.barrier()
        if dist.get_rank() == 2:  # does not call, and leaves only after the other ranks have raised
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
            return ""
        if dist.get_rank() == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        said = "nothing"
        try:
            dist.all_reduce(torch.ones(1))
        except KeyboardInterrupt:
            said = "interrupted"
        except dist.PeerLostError as error:
            said = str(error)
        (tmp_path / str(dist.get_rank())).touch()
        return said

    text, other_text, _ = run_ranks(3, body)
    assert text == "interrupted"
    assert "rank 0" in other_text
    assert "interrupted (Ctrl-C)" in other_text


def test_destroy_returns_with_calls_pending(tmp_path: Path) -> None:
    left = tmp_path / "left"

    def body() -> str:
        if dist.get_rank() == 1:
            wait_for(left.exists)
            dist.all_reduce(torch.ones(1000))  # rank 0 had sent its data before it left
            with pytest.raises(dist.PeerLostError, match="rank 0"):
                dist.all_reduce(torch.ones(1000))
            return ""
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        time.sleep(0.05)
        dist.destroy_process_group()
        left.touch()
        with pytest.raises(dist.AllranksError) as caught:
            works[2].wait()
        assert works[1].is_completed()
        assert isinstance(works[1].exception(), dist.AllranksError)
        return str(caught.value)

    assert "destroyed while the call was pending" in run_ranks(2, body)[0]


def test_killed_rank_leaves_no_file_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))

    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(2, body, may_die={0})
    left = set(os.listdir("/dev/shm")) - before
    deadline = time.monotonic() + 60  # other programs remove their own files within this time
    while left & set(os.listdir("/dev/shm")):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_child_forked_during_an_asynchronous_call_exits() -> None:
    """Fork a child whose copies of the core's condition variables have waiters that exist only in the parent."""

    def body() -> int:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        receiving = dist.irecv(torch.ones(1), 1 - dist.get_rank())
        pid = os.fork()
        if pid == 0:
            try:
                import gc

                for call in (work.is_completed, work.wait, receiving.is_completed, receiving.wait):
                    with pytest.raises(dist.NotInitializedError, match="A forked child can neither"):
                        call()
                del work, receiving
                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1
        work.wait()
        dist.send(torch.ones(1), 1 - dist.get_rank())
        receiving.wait()
        return os.waitstatus_to_exitcode(ended[1])

    assert run_ranks(2, body) == [0, 0]


def test_destroy_in_a_signal_handler_ends_the_blocked_call(tmp_path: Path) -> None:
    left = tmp_path / "left"

    def body() -> str:
        if dist.get_rank() == 1:
            wait_for(left.exists)
            return ""
        signal.signal(signal.SIGUSR2, lambda *_: dist.destroy_process_group())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(dist.AllranksError) as caught:
            dist.barrier()
        left.touch()
        return str(caught.value)

    assert "destroyed while the call was pending" in run_ranks(2, body)[0]


def test_recv_times_out_while_another_rank_sends_messages() -> None:
    """Let rank 0 wait for rank 1, which never sends, while messages from rank 2 wake rank 0 continuously."""

    def body() -> None:
        me = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group(timeout=0.5)
        if me == 1:
            time.sleep(1.5)
        elif me == 2:

            def talk() -> None:
                for _ in range(300):
                    dist.send(torch.ones(1), 0, tag=1)
                    time.sleep(0.005)

            with pytest.raises(dist.AllranksError):  # rank 0 has left
                talk()
        else:
            with pytest.raises(dist.TimeoutError, match="rank 1"):
                dist.recv(torch.ones(1), 1)

    run_ranks(3, body)


def test_send_and_recv_raise_if_the_peer_has_left() -> None:
    def body() -> None:
        if dist.get_rank() > 0:
            dist.destroy_process_group()
            return
        time.sleep(0.3)
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            dist.send(torch.ones(1), 1)
        with pytest.raises(dist.PeerLostError, match="has left the group"):
            dist.recv(torch.ones(1))

    run_ranks(3, body)
