"""Names that exist for programs written for torch.distributed: Backend, the debug level, methods of groups."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as peer

import allranks as dist
from allranks.testing import run_ranks


def test_backend_is_a_lowercase_name() -> None:
    assert dist.Backend("NATIVE") == dist.Backend.NATIVE == "native"
    for name in ("UNDEFINED", "GLOO", "NCCL", "XCCL", "UCC", "MPI"):
        assert getattr(dist.Backend, name) == getattr(peer.Backend, name) == dist.Backend(name)
    assert dist.is_backend_available(dist.Backend("Native"))
    for wrong in (None, 3, ["native"]):
        with pytest.raises(ValueError, match="expected a name"):
            dist.Backend(wrong)


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "OFF"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "DETAIL"),
        ({"ALLRANKS_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "INFO"),
        ({"ALLRANKS_DEBUG": "1"}, "DETAIL"),
        ({"ALLRANKS_DEBUG": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "OFF"),
        ({"TORCH_DISTRIBUTED_DEBUG": "loud"}, "ConfigError"),
    ],
)
def test_debug_level_is_read_from_the_environment(environ: dict[str, str], level: str) -> None:
    code = """
import allranks as dist
try:
    print(dist.get_debug_level().name)
except ValueError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == level


def test_debug_level_can_be_set_and_read_again_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks._call.debug._level", None)
    dist.set_debug_level(dist.DebugLevel.INFO)
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    dist.set_debug_level(peer.DebugLevel.DETAIL)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    monkeypatch.setenv("ALLRANKS_DEBUG", "OFF")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.OFF
    with pytest.raises(TypeError, match="DebugLevel"):
        dist.set_debug_level("INFO")


def test_group_methods_accept_the_arguments_of_torch() -> None:
    def body() -> None:
        group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        tensor = torch.tensor([rank + 1.0])
        (result,) = group.allreduce([tensor]).get_future().wait()
        assert result.item() == tensor.item() == 3
        options = peer.AllreduceOptions()
        options.reduceOp = peer.ReduceOp.MAX
        tensor = torch.tensor([rank + 1.0])
        assert group.allreduce([tensor], options).wait()
        assert tensor.item() == 2
        outputs = [torch.zeros(1) for _ in range(size)]
        group.allgather([outputs], [torch.tensor([float(rank)])]).wait()
        assert torch.cat(outputs).tolist() == [0, 1]
        group.allgather(outputs, torch.tensor([rank + 5.0])).wait()
        assert torch.cat(outputs).tolist() == [5, 6]
        group.alltoall(outputs, [torch.tensor([rank * 2.0 + i]) for i in range(size)]).wait()
        assert torch.cat(outputs).tolist() == [rank, rank + 2]
        with pytest.raises(dist.UsageError, match="a list of one tensor, not of 2"):
            group.allreduce([tensor, tensor])

    run_ranks(2, body)


WAIT_S = 5  # longer than the time between two ranks' arrivals, even on a busy machine


def test_monitored_barrier_error_ends_with_the_message_of_torch() -> None:
    def body() -> str:
        group = dist.new_group([0, 1, 2, 3])
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        said = ""
        if dist.get_rank() in (0, 3):
            with pytest.raises(dist.TimeoutError) as caught:
                group.monitored_barrier(WAIT_S, wait_all_ranks=True)
            assert caught.value.ranks == (1, 2)
            said = str(caught.value)
        dist.barrier()
        return said

    zero, _, _, three = run_ranks(4, body)
    assert "no data from rank 1" in zero
    assert zero.endswith(
        f"Rank 0 timed out in monitoredBarrier after {WAIT_S * 1000:.0f} ms: Ranks 1, 2 failed to pass monitoredBarrier"
    )
    assert three.endswith("but received errors while waiting for send/recv from rank 0")


def test_init_process_group_rejects_wrong_device_and_options() -> None:
    dist.init_process_group(device_id=torch.device("cpu"))
    dist.destroy_process_group()
    for backend, wrong, says in (
        ("gloo", torch.device("cuda:0"), "the gloo engine does not support cuda tensors"),
        ("native", torch.device("cuda:99"), "device_id device"),
        (None, 99, "device_id 99: "),
        (None, "cpu0", "device_id 'cpu0': "),
    ):
        with pytest.raises(ValueError, match=says):
            dist.init_process_group(backend, device_id=wrong)
    with pytest.raises(ValueError, match="does not support pg_options 'fast'"):
        dist.init_process_group(pg_options="fast")
