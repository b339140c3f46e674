"""DistributedSampler returns torch's indices, and the same global batches for every number of ranks."""

import itertools

import pytest
import torch
import torch.utils.data.distributed as theirs
from torch.utils.data import DataLoader

import allranks
from allranks.data import DistributedSampler
from allranks.testing import run_ranks


@pytest.mark.parametrize("samples", [1, 7, 24, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_sampler_returns_the_same_indices_as_torch(samples, ranks, shuffle, drop_last):
    data = range(samples)
    for rank in range(ranks):
        settings = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        mine, reference = DistributedSampler(data, **settings), theirs.DistributedSampler(data, **settings)
        assert len(mine) == len(reference)
        for epoch in (0, 1, 7):
            mine.set_epoch(epoch)
            reference.set_epoch(epoch)
            assert list(mine) == list(reference)
        assert isinstance(mine, theirs.DistributedSampler)  # Lightning and other trainers check this.


@pytest.mark.parametrize("samples", [1437, 256, 77])
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples):
    def batches(ranks, global_batch=24):
        per_rank = []
        for rank in range(ranks):
            sampler = DistributedSampler(range(samples), ranks, rank, seed=3, drop_last=True)
            sampler.set_epoch(2)
            loader = DataLoader(range(samples), global_batch // ranks, sampler=sampler, drop_last=True)
            per_rank.append([batch.tolist() for batch in loader])
        return [sorted(itertools.chain(*parts)) for parts in zip(*per_rank, strict=True)]

    one = batches(1)
    assert len(one) == samples // 24
    for ranks in (2, 3, 4, 8):
        assert batches(ranks) == one


def test_sampler_requires_a_world_or_explicit_ranks():
    with pytest.raises(allranks.NotInitializedError, match="init_process_group"):
        DistributedSampler(range(4))
    with pytest.raises(ValueError, match="rank=2: expected 0 to num_replicas - 1 = 1"):
        DistributedSampler(range(4), num_replicas=2, rank=2)


def test_sampler_takes_rank_and_size_from_the_world():
    def body():
        import allranks as dist
        from allranks.data import DistributedSampler

        sampler = DistributedSampler(range(10), shuffle=False)
        return dist.get_rank(), list(sampler)

    assert run_ranks(2, body) == [(0, [0, 2, 4, 6, 8]), (1, [1, 3, 5, 7, 9])]


def test_sampler_order_depends_only_on_seed_and_epoch():
    sampler = DistributedSampler(range(50), 2, 0)
    torch.manual_seed(1)
    first = list(sampler)
    torch.manual_seed(2)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
