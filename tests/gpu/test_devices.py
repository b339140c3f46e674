"""Device tensors on the engines: on a GPU if one is available, and always on a stand-in."""

from __future__ import annotations

from pathlib import Path

import checks
import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.mpi_jobs import run_by_mpi

FOLDER = str(Path(__file__).parent)
GPUS = torch.cuda.device_count()  # does not initialize CUDA

gpu = pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU, and a torch that was built for it")


def test_native_passes_all_checks_on_the_stand_in_device() -> None:
    """Run the checks without a GPU. Pinned memory and streams need a real GPU."""
    several = (*checks.CHECKS, checks.outputs_wait_for_their_stream, checks.captures_are_refused)
    run_ranks(2, checks.on, several, "native", "away", FOLDER, init=False, timeout_s=110)


@pytest.mark.parametrize("backend", ["native", "cpu:gloo,away:native"])
def test_ranks_continue_after_a_loss_on_the_stand_in_device(backend: str) -> None:
    run_ranks(3, checks.on, [checks.a_loss], backend, "away", FOLDER, init=False, may_die=[2])


def test_native_sends_the_data_of_allranks_as_tensors_of_the_stand_in_device() -> None:
    run_ranks(2, checks.on, [checks.alone_on_its_device], "native", "away", FOLDER, init=False)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs a torch that was built with gloo")
def test_gloo_moves_cpu_tensors_and_native_moves_stand_in_tensors() -> None:
    several = (checks.cpu_beside_it, checks.messages)
    run_ranks(2, checks.on, several, "cpu:gloo,away:native", "away", FOLDER, init=False)


def test_mpi_passes_checks_on_the_stand_in_device() -> None:
    several = (
        checks.every_verb,
        checks.messages,
        checks.from_any_rank,
        checks.dtypes,
        checks.layouts,
        checks.scaled_sums,
        checks.objects_and_sparse,
        checks.several_waiters,
        checks.training,
        checks.alone_on_its_device,
    )

    def body() -> None:
        dist.destroy_process_group()
        checks.on(several, "mpi", "away", FOLDER)

    run_by_mpi("mpich", 2, body, timeout_s=110)


@gpu
@pytest.mark.parametrize("check", [*checks.CHECKS, *checks.ON_STREAMS], ids=lambda check: check.__name__)
def test_native_passes_check_with_two_ranks_on_one_gpu(check: checks.Check) -> None:
    run_ranks(2, checks.on, [check], "native", "cuda", FOLDER, init=False, env={"LOCAL_RANK": "0"})


@gpu
@pytest.mark.parametrize("backend", ["nccl", None, "cpu:gloo,cuda:nccl"])
def test_nccl_passes_checks_with_one_rank_on_each_gpu(backend: str | None) -> None:
    several = [*checks.ON_NCCL, *checks.ON_STREAMS]
    if backend != "nccl":
        several.append(checks.cpu_beside_it)
    run_ranks(GPUS, checks.on, several, backend, "cuda", FOLDER, init=False)


@gpu
@pytest.mark.skipif(GPUS < 2, reason="needs one GPU for the lost rank and one for another rank")
@pytest.mark.parametrize("backend", ["nccl", None])
def test_ranks_continue_after_a_loss_on_nccl(backend: str | None) -> None:
    run_ranks(GPUS, checks.on, [checks.a_loss], backend, "cuda", FOLDER, init=False, may_die=[GPUS - 1])


@gpu
def test_plugin_moves_cpu_tensors_and_nccl_moves_cuda_tensors() -> None:
    run_ranks(GPUS, checks.on, [checks.plugin_beside_nccl], "native", "cuda", FOLDER, init=False)
