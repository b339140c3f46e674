"""Workers of master-worker mode that store their tensors on a GPU. Several workers may share a GPU."""

from __future__ import annotations

import pytest
import torch
import whole_jobs

gpu = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU, and a torch that was built for it")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=gpu)])
def test_workers_compute_the_same_values_as_the_master(kind: str) -> None:
    whole_jobs.workers(kind, {}, 250.0, "native")
