"""Arguments and failures that could access wrong memory, mix up tensors, or block the other ranks."""

import os
import resource
import threading
import time

import pytest
import torch

import allranks as dist
from allranks import _core
from allranks.testing import run_ranks

COUNT = 70_000  # float32: more than one chunk of the ring


def test_missing_tensors_and_lists_of_wrong_length_are_refused() -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        for call in (lambda: group.reduce_scatter(torch.ones(2), None), lambda: group.all_gather(None, torch.ones(2))):
            with pytest.raises(TypeError, match="expected a tensor or a list"):
                call()
        for sizes in ((1, 2), (1, 2, 3, 4)):  # wrong lengths for three ranks, with uneven sizes
            with pytest.raises(dist.UsageError, match="expected a list of 3 tensors"):
                dist.all_gather([torch.zeros(n) for n in sizes], torch.ones(rank + 1))
        dist.barrier()

    run_ranks(3, body)


def test_all_gather_fills_tensors_of_a_list_that_is_emptied_during_the_call() -> None:
    def body() -> float:
        outs = [torch.zeros(2_000_000) for _ in range(2)]
        kept = outs[1].view(-1)
        if dist.get_rank() == 0:
            timer = threading.Timer(0.2, outs.clear)
            timer.start()
        else:
            time.sleep(0.5)
        dist.all_gather(outs, torch.full((2_000_000,), 1.0 + dist.get_rank()))
        return float(kept.min())

    assert run_ranks(2, body) == [2.0, 2.0]


def test_shared_blocks_after_a_mismatch_are_not_mixed_up() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(dist.MismatchError):
            dist.empty_shared(COUNT) if rank == 0 else dist.all_reduce(torch.ones(3))
        first = dist.empty_shared(COUNT).fill_(1 + rank)
        second = dist.empty_shared(COUNT).fill_(100 + rank)
        dist.all_reduce(first if rank == 0 else second)  # different blocks
        assert (first if rank == 0 else second).unique().tolist() == [102]

    run_ranks(2, body)


def test_outputs_may_overlap_inputs_in_shared_memory() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        values = torch.arange(size * COUNT, dtype=torch.float32) % 1009 + rank
        alls = [torch.arange(size * COUNT, dtype=torch.float32) % 1009 + r for r in range(size)]
        for _ in range(5):
            tensor = dist.empty_shared(size * COUNT).copy_(values)
            dist.all_to_all_single(tensor, tensor)
            assert torch.equal(tensor, torch.cat([a.view(size, COUNT)[rank] for a in alls]))
            tensor = dist.empty_shared(size * COUNT).copy_(values)
            dist.reduce_scatter_tensor(tensor[:COUNT], tensor)
            assert torch.equal(tensor[:COUNT], sum(a.view(size, COUNT)[rank] for a in alls))
            tensor = dist.empty_shared(size * COUNT).copy_(values)
            dist.all_gather_into_tensor(tensor, tensor[COUNT : 2 * COUNT])  # the input is at the position of rank 1
            assert torch.equal(tensor, torch.cat([a[COUNT : 2 * COUNT] for a in alls]))

    run_ranks(2, body)


def test_empty_shared_raises_on_every_rank_if_one_lacks_descriptors_or_passes_no_bytes() -> None:
    def body() -> None:
        rank = dist.get_rank()
        dist.empty_shared(4)
        held: list[int] = []
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        for left in (0, 1, 2):
            if rank == 1:
                highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, limits[1]))
                while True:
                    try:
                        held.append(os.dup(2))
                    except OSError:
                        break
                for _ in range(left):
                    os.close(held.pop())
            with pytest.raises(dist.AllranksError, match="could not be allocated on every rank"):
                dist.empty_shared(1 << 16)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            while held:
                os.close(held.pop())
        with pytest.raises(dist.MismatchError, match="rank 0: 0, rank 1: 20"):
            dist.empty_shared(0 if rank == 0 else 5)
        dist.all_reduce(dist.empty_shared(100).fill_(1))  # the group still works

    # A rank waits for an unreachable peer for at most half of the timeout of the group.
    def with_timeout() -> None:
        dist.init_process_group(timeout=6.0)
        body()

    run_ranks(2, with_timeout, init=False)


def test_failed_mapping_leaves_no_open_descriptor() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = held()
    sizes = _core.Sizes()
    settings = ((0.0, 0.0), (0.0, 0.0), 0, _core.Tuning())
    for _ in range(3):
        short = [_core.create_memory(4096) for _ in range(2)]
        sockets = [os.dup(2), os.dup(2)]
        with pytest.raises(_core.Failure):
            _core.Comm(0, sizes, short, _core.Liveness(sockets), 1.0, *settings)
        short, sockets = [_core.create_memory(4096)], [os.dup(2)]
        with pytest.raises(_core.Failure):
            _core.Comm.across_hosts(
                0, [0, 1], sizes, short, _core.Liveness(sockets), [-1, os.dup(2)], -1, 0, 1.0, *settings
            )
    assert held() == before


def test_default_device_of_torch_does_not_affect_calls() -> None:
    def body() -> None:
        torch.set_default_device("meta")
        assert dist.empty_shared(COUNT).device.type == "cpu"
        tensor = torch.ones(3, 4, device="cpu").T
        dist.all_reduce(tensor)
        assert (tensor == 2).all()

    run_ranks(2, body)


def test_debug_mode_accepts_barriers_at_alternating_call_sites() -> None:
    def body() -> None:
        for turn in range(4):
            if dist.get_rank() == turn % 2:
                dist.barrier()
            else:
                dist.barrier()

    run_ranks(2, body, env={"ALLRANKS_DEBUG": "1"})


def test_long_call_site_is_truncated_between_characters() -> None:
    def body() -> list[str]:
        texts = []
        for pad in ("", "a", "aa", "aaa"):
            space = {"dist": dist, "torch": torch, "rank": dist.get_rank()}
            code = "def f():\n    dist.all_reduce(torch.ones(4 + rank))\n"
            exec(compile(code, f"/{'é' * 140}{pad}.py", "exec"), space)
            with pytest.raises(dist.MismatchError) as caught:
                space["f"]()
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(2, body):
        assert all("ééé" in text and ".py:2" in text for text in texts)


def test_all_to_all_counts_its_bytes_and_lets_other_threads_run() -> None:
    def body() -> None:
        tensor = torch.zeros(30_000_000)
        dist.all_to_all_single(torch.empty_like(tensor), tensor)
        assert dist.stats().bytes == tensor.nbytes
        ticks = []
        stop = threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks.append(time.perf_counter())

        thread = threading.Thread(target=tick)
        thread.start()
        began = time.perf_counter()
        dist.all_to_all_single(torch.empty_like(tensor), tensor)
        ended = time.perf_counter()
        stop.set()
        thread.join()
        assert sum(began < t < ended for t in ticks) > 100

    run_ranks(2, body)


def test_forked_child_unmaps_shared_memory() -> None:
    def body() -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with open("/proc/self/maps") as maps:
                os.write(write, bytes([sum("memfd:allranks" in line for line in maps)]))
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(read, 1)[0]

    assert run_ranks(2, body) == [0, 0]
