"""`torch.worker` and `torch.accelerator` provide the functions that programs for accelerators use in `torch.cuda`."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import NotInitializedError, UsageError
from allranks.remote.master.master import Master

pytestmark = pytest.mark.usefixtures("mw")

W = "worker:1"
worker: Any = None  # torch.worker, which exists only after a master has been created


@pytest.fixture(autouse=True)
def module(mw: Master) -> None:
    global worker
    worker = torch.worker


def on_worker(mw: Master, function: Callable[[], Any], rank: int = 1) -> Any:
    return mw.remote(function, on=rank)().result()


def test_names_that_accelerators_share_exist_or_explain_their_absence() -> None:
    for name in sorted({*torch.cuda.__all__} & {*torch.xpu.__all__}):
        if not hasattr(worker, name):
            with pytest.raises(AttributeError, match=rf"torch\.worker has no '{name}': \w+"):
                getattr(worker, name)
    assert all(hasattr(worker, name) for name in worker.__all__)
    with pytest.raises(AttributeError, match=r"torch\.worker has no 'reset_memory'$"):
        _ = worker.reset_memory
    assert torch.get_device_module(W) is torch.get_device_module() is worker
    import torch.worker as imported  # type: ignore[import-not-found]

    assert imported is worker


def test_device_properties_describe_the_worker(mw: Master) -> None:
    found = worker.get_device_properties(2)
    assert (found.type, found.host, found.total_memory) == (
        "cpu", socket.gethostname(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )  # fmt: skip
    assert found.multi_processor_count == on_worker(mw, torch.get_num_threads, 2)
    assert found.capability == torch.backends.cpu.get_cpu_capability()
    assert worker.get_device_name(W) == found.name != ""
    with pytest.raises(UsageError, match=r"worker:1 computes on a CPU.*\n.*its instruction set"):
        worker.get_device_capability()
    assert worker.is_bf16_supported()
    assert not worker.is_tf32_supported()
    assert worker.get_arch_list() == []
    assert worker.can_device_access_peer(1, 2)
    assert not worker.can_device_access_peer(1, 1)


def test_memory_statistics_match_the_worker_process(mw: Master) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    on_worker(mw, resident)  # the first call imports modules on the worker
    gc.collect()
    worker.empty_cache()
    worker.reset_peak_memory_stats(W)
    allocated, reserved = worker.memory_allocated(W), worker.memory_reserved(W)
    x = torch.ones(1 << 24, device=W)
    assert worker.memory_allocated(W) - allocated == 1 << 26
    held = worker.memory_reserved(W)
    assert held - reserved > (1 << 25)
    assert abs(held - on_worker(mw, resident)) < 1 << 23
    free, total = worker.mem_get_info(W)
    assert 0 < free < total
    del x
    worker.empty_cache()
    assert worker.memory_allocated(W) == allocated
    assert worker.memory_reserved(W) < held - (1 << 25)
    assert worker.max_memory_reserved(W) > held - (1 << 22)  # Linux updates its page counts with a delay
    worker.reset_peak_memory_stats(W)
    assert worker.max_memory_reserved(W) < held - (1 << 25)
    assert worker.memory_stats_as_nested_dict(W)["reserved_bytes"]["all"]["peak"] > 0
    with pytest.raises(
        UsageError, match=r"worker:1 computes on a CPU, for which torch does not record.*\n.*max_memory_reserved"
    ):
        worker.max_memory_allocated(W)
    with pytest.raises(UsageError, match=r"group .* has no statistics of its own"):
        worker.memory_allocated(mw.group([1, 2]).device)


def test_random_states_of_all_workers_are_seeded_and_restored() -> None:
    worker.manual_seed_all(5)
    states = worker.get_rng_state_all()
    right = [torch.randn(3, device=f"worker:{rank}").cpu() for rank in (1, 2)]
    assert torch.equal(*right)
    assert worker.initial_seed() == 5
    with torch.random.fork_rng():
        torch.randn(3, device="worker:2")
        worker.set_rng_state_all(states)
        assert torch.equal(torch.randn(3, device="worker:2").cpu(), right[0])
        worker.seed_all()
        assert worker.initial_seed() != 5
    after = torch.randn(3, device="worker:2").cpu()
    torch.manual_seed(5)
    torch.randn(3)
    assert torch.equal(after, torch.randn(3))


def test_device_contexts_select_the_current_worker() -> None:
    x = torch.ones(2, device="worker:2")
    for context in (worker.device(2), worker.device("worker:2"), worker.device_of(x), worker.stream(worker.Stream(2))):
        with context:
            assert worker.current_device() == torch.accelerator.current_device_index() == 2
        assert worker.current_device() == 1
    for nothing in (worker.device(None), worker.device(-1), worker.device_of(torch.ones(2)), worker.stream(None)):
        with nothing:
            assert worker.current_device() == 1
    with pytest.raises(ValueError, match="Expected a worker, but got: cpu"):
        worker.synchronize("cpu")


def test_streams_and_events_use_the_one_queue_of_a_worker(mw: Master) -> None:
    first, second = worker.Stream(1), worker.Stream(2, priority=-1)
    assert isinstance(first, torch.Stream)
    assert first == worker.current_stream() == worker.default_stream(W) != second
    assert (first.device, second.device) == (torch.device(W), torch.device("worker:2"))
    with second:
        x = torch.ones(2, device="worker")
    assert str(x.device) == "worker:2"
    x.record_stream(second)
    start, end = worker.Event(enable_timing=True), worker.Event(enable_timing=True)
    assert start.query()
    assert isinstance(start, torch.Event)
    with pytest.raises(UsageError, match="has not been recorded"):
        start.elapsed_time(end)
    second.record_event(start)
    called = mw.remote(time.sleep, on=2)(0.05)
    end.record(second)
    second.wait_event(end)
    second.wait_stream(first)
    assert end.query()
    assert second.query()
    assert start.elapsed_time(end) >= 50
    called.result()
    with pytest.raises(UsageError, match="the clocks of different workers differ"):
        start.elapsed_time(first.record_event())
    with pytest.raises(UsageError, match="enable_timing"):
        start.elapsed_time(second.record_event(worker.Event(enable_timing=False)))


def test_torch_stream_and_event_classes_work_with_workers(mw: Master) -> None:
    stream = torch.Stream("worker:2")
    assert stream == torch.Stream(device=2) == worker.Stream(2)
    assert torch.Stream() == torch.accelerator.current_stream() == worker.Stream(1)
    start, end = torch.Event(enable_timing=True), torch.Event(W, enable_timing=True)
    for each, kind in ((stream, torch.Stream), (start, torch.Event)):
        assert isinstance(each, kind)
        assert issubclass(type(each), kind)
    assert not isinstance(stream, torch.Event)
    start.record()
    called = mw.remote(time.sleep, on=1)(0.05)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 50
    called.result()
    with pytest.raises(UsageError, match="enable_timing=True"):
        start.elapsed_time(torch.Stream().record_event(torch.Event()))
    plain = torch.Stream(stream_id=7, device_index=0, device_type=1)
    assert type(plain).__mro__[1].__name__ == "Stream"
    assert isinstance(plain, torch.Stream)
    assert not isinstance(plain, worker.Stream)

    class Own(torch.Stream):
        pass

    own: Any = Own(stream_id=7, device_index=0, device_type=1)
    assert isinstance(own, Own)
    assert not isinstance(plain, Own)


def test_torch_accelerator_functions_use_the_worker() -> None:
    accelerator = torch.accelerator
    assert str(accelerator.current_accelerator(check_available=True)) == "worker"
    assert accelerator.device_count() == 2
    accelerator.set_device_index("worker:2")
    assert accelerator.current_device_index() == worker.current_device() == 2
    accelerator.set_device_index(-1)
    with accelerator.device_index(1):
        assert str(torch.ones(1, device="worker").device) == W
    with accelerator.device_index(None):
        assert str(torch.ones(1, device="worker").device) == "worker:2"
    accelerator.set_stream(accelerator.current_stream(W))
    assert accelerator.current_device_index() == 1
    accelerator.current_stream().synchronize()
    before = accelerator.memory_allocated(2)
    x = torch.ones(1000, device="worker:2")
    assert accelerator.memory_allocated(2) - before == 4000
    assert 0 < accelerator.memory_reserved(x.device) <= accelerator.max_memory_reserved(x.device)
    with pytest.raises(UsageError, match="worker:2 computes on a CPU"):
        accelerator.max_memory_allocated(2)
    accelerator.reset_peak_memory_stats(2)
    accelerator.reset_accumulated_memory_stats()
    accelerator.empty_cache()
    assert accelerator.get_memory_info("worker:2")[1] == worker.get_device_properties().total_memory
    if hasattr(accelerator, "get_device_capability"):
        assert {torch.float32, torch.int64} <= accelerator.get_device_capability()["supported_dtypes"]
    with pytest.raises(ValueError, match="cuda doesn't match the current accelerator worker"):
        accelerator.set_device_index("cuda:1")
    x = torch.ones(2, device=W)
    x[torch.tensor([0], device=W)]  # the master waits for the first call of a new operation
    x[torch.tensor([7], device=W)]
    accelerator.synchronize("worker:2")
    with pytest.raises(dist.RemoteError, match="index 7 is out of bounds"):
        accelerator.synchronize()
    accelerator.synchronize("worker:2")
    with pytest.raises(UsageError, match="worker:7 does not exist"):
        accelerator.synchronize(7)


def test_accelerator_exists_only_while_workers_run() -> None:
    program = """
import torch, allranks
assert torch.accelerator.current_accelerator() is None and not hasattr(torch, "worker")
fork_rng, synchronize = torch.random.fork_rng, torch.accelerator.synchronize
torch.nn.DataParallel(torch.nn.Linear(2, 2))(torch.ones(2))
with allranks.init_master_worker(workers=1):
    synchronize()  # found before
    assert torch.accelerator.is_available() and torch.worker.is_initialized()
assert not torch.accelerator.is_available() and torch.worker.device_count() == 0 == torch.accelerator.device_count()
torch.accelerator.synchronize()
torch.worker.synchronize()
torch.worker.empty_cache()
torch.manual_seed(0)
with torch.random.fork_rng():
    torch.rand(2)
try:
    torch.worker.init()
except allranks.UsageError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "this process has no workers.\n  Call allranks.init_master_worker() first" in said.stdout, said.stderr


class Held(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset whose tensors are on a worker."""

    def __init__(self) -> None:
        self.x = torch.arange(4.0, device=W)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def test_worker_tensors_in_data_loader_processes_raise_with_advice() -> None:
    data = Held()
    assert [x.tolist() for x in torch.utils.data.DataLoader(data, batch_size=2)] == [[0, 1], [2, 3]]
    with pytest.raises(NotInitializedError, match=r"belongs to the parent process.*[\s\S]*with \.cpu\(\)"):
        list(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"))
    for method in ("spawn", "forkserver"):
        with pytest.raises(UsageError, match=r"cannot be sent to another process.*\n  Send its \.cpu\(\)"):
            list(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context=method))
    assert data.x.sum().item() == 6


def test_a_forked_child_has_no_accelerator() -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = f"{worker._is_in_bad_fork()} {torch.accelerator.is_available()} {worker.is_initialized()} "
        try:
            worker.synchronize()
        except NotInitializedError:
            said += "refused"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        assert pipe.read() == "True False False refused"
    os.waitpid(child, 0)
    assert not worker._is_in_bad_fork()


def test_torch_data_parallel_refers_to_allranks_data_parallel() -> None:
    for module in (torch.nn.Linear(2, 2, device=W), torch.nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=r"Use allranks\.DataParallel\(module, device_ids="):
            torch.nn.DataParallel(module)
    assert dist.DataParallel(torch.nn.Linear(2, 2, device=W))(torch.ones(4, 2)).shape == (4, 2)
