"""Replicas that differ: `trace.check_replicas` and ``DistributedDataParallel(check_every=...)`` name the difference."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks as dist
from allranks._call.digests import _hash_on_device, digest
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks

RANKS = 3
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))


def _error(*args: Any, **options: Any) -> str:
    with pytest.raises(dist.MismatchError) as caught:
        dist.trace.check_replicas(*args, **options)
    return str(caught.value)


class _Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


def test_every_differing_element_is_located_in_every_dtype_and_layout() -> None:
    def body() -> list[tuple[str, str]]:
        wrong = []
        layouts = {
            "contiguous": lambda dtype: torch.zeros(7, 5, dtype=dtype),
            "transposed": lambda dtype: torch.zeros(5, 7, dtype=dtype).t(),
            "strided": lambda dtype: torch.zeros(7, 15, dtype=dtype)[:, ::3],
            "offset": lambda dtype: torch.zeros(9, 5, dtype=dtype)[1:8],
            "many": lambda dtype: torch.zeros(70_000, dtype=dtype).view(14_000, 5),
        }
        for dtype, (layout, make) in itertools.product(DTYPES, layouts.items()):
            tensor = make(dtype)
            if dist.get_rank() == 1:
                tensor[3, 2] = tensor[5, 1] = 1
            text = _error(_Holder(tensor))
            one = "True" if dtype is torch.bool else "(1+0j)" if dtype.is_complex else "1"
            zero = "False" if dtype is torch.bool else "0j" if dtype.is_complex else "0"
            if f"value[3, 2] is {zero} on ranks 0, 2, but {one} on rank 1; elements up to [5, 1]" not in text:
                wrong.append((f"{dtype} {layout}", text))
        return wrong

    assert run_ranks(RANKS, body) == [[]] * RANKS


def test_values_without_a_position_are_described() -> None:
    def body() -> dict[str, str]:
        rank = dist.get_rank()
        index = torch.tensor([[0, rank // 2]])
        return {
            "scalar": _error(_Holder(torch.tensor(float(rank == 2)))),
            "shape": _error(_Holder(torch.zeros(4 + (rank == 2)))),
            "dtype": _error(_Holder(torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32))),
            "sparse": _error(_Holder(torch.sparse_coo_tensor(index, torch.ones(2), (4,)))),
            "all": _error(_Holder(torch.full((2,), float(rank)))),
        }

    for found in run_ranks(RANKS, body):
        assert found is not None
        assert "value is 0 on ranks 0-1, but 1 on rank 2." in found["scalar"]
        assert (
            "value is a torch.float32 of shape (4,) on ranks 0-1, but a torch.float32 of shape (5,)" in found["shape"]
        )
        assert "but a torch.float64 of shape (4,) on rank 2" in found["dtype"]
        assert "on ranks 0-1, but a torch.float32 of shape (4,) on rank 2" in found["sparse"]
        assert "value[0] is 0 on rank 0, but 1 on rank 1, but 2 on rank 2; elements up to [1]" in found["all"]


def test_a_flipped_bit_is_called_a_memory_fault_with_rank_and_host() -> None:
    def body() -> str:
        model = _net()
        if dist.get_rank() == 2:
            model[0].weight.data.view(torch.int32)[17, 4] ^= 1 << 29
        return _error(model)

    for text in run_ranks(RANKS, body):
        assert text is not None
        assert "0.weight[17, 4] is " in text
        assert "on rank 2 (one bit differs).\n  A single bit indicates a memory fault: test the memory of " in text
        assert "the host of rank 2. Restart from a checkpoint." in text


def test_batch_statistics_may_differ_and_other_buffers_may_not() -> None:
    def body() -> str:
        model = _net()
        model(torch.randn(4, 20) + dist.get_rank())
        dist.trace.check_replicas(model)
        dist.trace.check_replicas(model, buffers=())
        return _error(model, buffers=["1.running_mean"])

    for text in run_ranks(RANKS, body):
        assert text is not None
        assert "1.running_mean[0] is" in text


def test_optimizer_state_and_settings_are_compared() -> None:
    def body() -> list[str]:
        model = DistributedDataParallel(_net())
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        dist.trace.check_replicas(model, optimizer)
        found = []
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        found.append(_error(model, optimizer))
        optimizer.param_groups[0]["lr"] = 0.5
        if dist.get_rank() == 1:
            optimizer.state[model.module[0].bias]["exp_avg"][7] = 2
        found.append(_error(model, optimizer))
        # As with ZeroRedundancyOptimizer: only some ranks have the state of a parameter.
        optimizer.state.clear() if dist.get_rank() == 1 else None
        dist.trace.check_replicas(model, optimizer)
        return found

    for texts in run_ranks(RANKS, body):
        assert texts is not None
        assert "optimizer.param_groups[0]['lr'] is 0.001 on ranks 0, 2, but 0.5 on rank 1" in texts[0]
        assert "optimizer.exp_avg(0.bias)[7] is" in texts[1]


def test_a_parameter_that_some_ranks_lack_and_wrong_arguments_are_reported() -> None:
    def body() -> str:
        model: Any = _net()
        for wrong in ({"optimizer": "adam"}, {"buffers": ["1.runing_mean"]}):
            with pytest.raises(dist.UsageError, match=r"check_replicas: "):
                dist.trace.check_replicas(model, **wrong)
        with pytest.raises(dist.UsageError, match="Pass a module"):
            dist.trace.check_replicas(model.state_dict())
        if dist.get_rank() == 2:
            model.add_module("extra", nn.Linear(2, 2))
        return _error(model)

    for text in run_ranks(RANKS, body):
        assert text is not None
        assert "extra.weight is missing on ranks 0-1, but a torch.float32 of shape (2, 2) on rank 2; extra.bias" in text


def test_ignored_parameters_and_equal_shards_are_compared_correctly() -> None:
    def body() -> None:
        model = _net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
        with torch.no_grad():
            model[0].bias += dist.get_rank()
        dist.trace.check_replicas(model)
        dist.trace.check_replicas(DistributedDataParallel(model))

    run_ranks(RANKS, body)


def test_works_on_a_group_and_on_torchs_own_backend(tmp_path: Path) -> None:
    def body() -> list[str]:
        from torch import distributed

        rank = dist.get_rank()
        model = _net()
        with torch.no_grad():
            model[2].bias += rank == 2
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.trace.check_replicas(model, group=pair)
        dist.destroy_process_group()
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=RANKS)
        wrapper = nn.parallel.DistributedDataParallel(_net())
        dist.trace.check_replicas(wrapper)
        found = [_error(model)]
        pair = distributed.new_group([0, 2])
        if rank != 1:
            found.append(_error(model, group=pair))
        distributed.destroy_process_group()
        return found

    for rank, texts in enumerate(run_ranks(RANKS, body)):
        assert texts is not None
        assert "2.bias[0] is" in texts[0]
        assert "on ranks 0-1, but" in texts[0]
        assert rank == 1 or "on rank 0, but" in texts[1]


def _train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 20)).square().mean().backward()


def test_wrapper_compares_replicas_periodically() -> None:
    def body() -> list[str]:
        found = []
        for options in ({"check_every": 3}, {"check_every": 3, "static_graph": True}, {}, {"check_every": 0}):
            model = DistributedDataParallel(_net(), **options)
            model.module[0].bias.data.fill_(dist.get_rank())
            try:
                _train(model, 2)
                found.append("equal")
                _train(model, 97)
                found.append("equal")
                _train(model, 1)
            except dist.MismatchError as error:
                found.append(str(error))
        return found

    for texts in run_ranks(RANKS, body):
        assert texts is not None
        where = "DistributedDataParallel: the ranks train different models: 0.bias[0] is 0 on rank 0, but 1 on rank 1"
        assert [text[: len(where)] for text in texts] == ["equal", where] * 2 + ["equal", "equal", where] + [
            "equal"
        ] * 2


def test_wrapper_with_a_hook_compares_only_if_requested() -> None:
    def body() -> list[bool]:
        found = []
        for options in ({}, {"check_every": 1}):
            model = DistributedDataParallel(_net(), **options)
            model.register_comm_hook(None, dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
            with torch.no_grad():
                model.module[0].bias += dist.get_rank()
            try:
                _train(model, 100)
                found.append(False)
            except dist.MismatchError:
                found.append(True)
        return found

    assert run_ranks(RANKS, body) == [[False, True]] * RANKS


def test_wrong_intervals_are_refused() -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match="check_every must be >= 0, but is -1"):
            DistributedDataParallel(_net(), check_every=-1)
        with pytest.raises(dist.MismatchError, match=r"check_every=1 \(reference: check_every=0\)"):
            DistributedDataParallel(_net(), check_every=dist.get_rank())
        for wrong in (0, -2):
            with pytest.raises(dist.UsageError, match=r"check_every=.* is out of range"):
                dist.resilience.State(model=_net(), check_every=wrong)

    run_ranks(2, body)


def test_hash_on_a_device_changes_with_every_bit_and_position() -> None:
    words = torch.arange(10) * 12345678901
    hashes = {_hash_on_device(words)}
    for element, bit in itertools.product(range(10), range(64)):
        changed = words.clone()
        changed[element] ^= (1 << bit) if bit < 63 else -(1 << 63)
        hashes.add(_hash_on_device(changed))
    for first, second in itertools.combinations(range(10), 2):
        changed = words.clone()
        changed[[first, second]] = changed[[second, first]]
        hashes.add(_hash_on_device(changed))
        changed = words.clone()
        changed[[first, second]] ^= -(1 << 63)  # equal changes must not cancel each other
        hashes.add(_hash_on_device(changed))
    assert len(hashes) == 1 + 640 + 45 * 2
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))
