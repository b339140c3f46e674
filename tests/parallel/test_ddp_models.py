"""Models of all kinds: mixed and complex dtypes, groups, other wrappers' files, layers used twice."""

import copy
import io

import pytest
import torch
from ddp_rules import assert_equal, assert_same_bits, state, torchs_world
from torch import nn

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks


class Mixed(nn.Module):
    """One parameter of each dtype, shared and reused layers, one without elements, one without gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.f32 = nn.Linear(4, 4)
        self.f64 = nn.Linear(4, 4, dtype=torch.float64)
        self.bf16 = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.f16 = nn.Parameter(torch.randn(4, dtype=torch.float16))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.spin = nn.Parameter(torch.randn(150_000, dtype=torch.complex64))
        self.shared = self.f32
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)  # buffers that are None
        self.fixed = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("count", torch.tensor(dist.get_rank()))
        self.register_buffer("complex", torch.full((3,), 1j * dist.get_rank()))

    def forward(self, x):
        x = self.norm(self.shared(torch.tanh(self.f32(x))))
        x = x + self.f64(x.double()).float() + self.bf16(x.bfloat16()).float() + self.f16.float()
        x = x * self.fixed + self.nothing.sum()
        turned = torch.fft.ifft(torch.fft.fft(x) * self.phase * self.spin.mean())
        return turned.real


def train(model):
    x = torch.linspace(-1, 1, 8).view(2, 4) * (dist.get_rank() + 1)
    model(x).square().sum().backward()
    return state(model), [p.detach().clone() for p in model.parameters()]


def test_dtypes_shared_reused_and_fixed_parameters(tmp_path):
    def body(file):
        mine = []
        for kwargs in ({}, {"bucket_cap_mb": 0.00001}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model = DistributedDataParallel(Mixed(), **kwargs)
            mine.append(train(model))
        with torchs_world(file) as torchs:
            return mine, train(torchs(Mixed()))

    results = run_ranks(2, body, str(tmp_path / "meet"))
    for mine, reference in results:
        for way, same in zip(mine, results[0][0], strict=True):
            assert_equal(way, reference)
            for a, b in zip(way[0] + (way[1],), same[0] + (same[1],), strict=True):
                assert_same_bits(a, b)
        assert mine[0][0][0][-2] is not None
        assert mine[0][0][1][0] == 0
        assert mine[0][0][1][1].eq(0).all()  # rank 0's buffers


def test_group_of_its_own():
    """The source is the group's first rank, ranks that are not in it go their way, errors say the world's ranks."""

    def body():
        rank = dist.get_rank()
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            with pytest.raises(dist.UsageError, match="not a member"):
                DistributedDataParallel(nn.Linear(2, 2), process_group=group)
            return None
        torch.manual_seed(rank)
        first = nn.Linear(2, 2).weight.detach().clone()
        torch.manual_seed(rank)
        inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        inner[1].running_mean += rank
        model = DistributedDataParallel(inner, process_group=group)
        assert model.process_group is group
        weights, mean = inner[0].weight.detach().clone(), inner[1].running_mean.clone()
        model(torch.ones(2, 2) * rank).sum().backward()
        with model.join():
            for _ in range(rank):
                model(torch.randn(2, 2)).sum().backward()
        last = inner[1].running_mean.clone()
        texts = []
        with pytest.raises(dist.MismatchError) as caught:
            DistributedDataParallel(nn.Linear(2, rank), process_group=group)
        texts.append(str(caught.value))
        found = DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), process_group=group)
        found.module.forward = lambda x: found.module[0](x) if rank == 3 else found.module[1](found.module[0](x))
        with pytest.raises(dist.UsageError) as caught:
            found(torch.ones(1, 2)).sum().backward()
        texts.append(str(caught.value))
        with pytest.raises(RuntimeError, match="only if its process group is the default one"):
            copy.deepcopy(model)
        return first, weights, mean, last, texts

    one, three = (result for result in run_ranks(4, body) if result is not None)
    assert torch.equal(one[1], one[0])
    assert torch.equal(three[1], one[0])
    assert not torch.equal(three[0], one[0])
    assert one[2].tolist() == three[2].tolist() == [1.0, 1.0]
    assert torch.equal(one[3], three[3])
    assert one[4] == three[4]
    assert "Compared with rank 1's" in one[4][0]
    assert "rank 3: 2 of them, first difference at number 0: parameter weight: float32 (3, 2)" in one[4][0]
    assert "no gradient to 2 of 4 parameters on rank 3: 1.weight, 1.bias" in one[4][1]


def test_state_dicts_are_torchs(tmp_path):
    def body(file):
        rank = dist.get_rank()
        plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = DistributedDataParallel(copy.deepcopy(plain))
        with torchs_world(file) as torchs:
            theirs = torchs(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
            assert list(theirs.state_dict()) == list(mine.state_dict())
            mine.load_state_dict(theirs.state_dict(), strict=True)
            theirs.load_state_dict(mine.state_dict(), strict=True)
        plain.load_state_dict(mine.module.state_dict(), strict=True)
        mine.module.load_state_dict(plain.state_dict(), strict=True)
        plain.load_state_dict({k.removeprefix("module."): v for k, v in mine.state_dict().items()}, strict=True)
        with pytest.raises(RuntimeError, match="Missing key"):
            mine.load_state_dict(plain.state_dict())
        assert mine.train() is mine
        assert mine.eval() is mine
        assert not mine.module[1].training
        mine(torch.ones(2, 3) * rank).sum().backward()
        return state(mine)

    zero, one = run_ranks(2, body, str(tmp_path / "meet"))
    assert_same_bits(zero[0], one[0])


def test_copies_and_pickles_keep_their_ways():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)), static_graph=True, bucket_cap_mb=3)
        unused = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)), find_unused_parameters=True)
        file = io.BytesIO()
        torch.save(unused, file)
        file.seek(0)
        ends = []
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert twin.process_group is dist.group.WORLD
            twin(torch.ones(1, 3) * rank).sum().backward()
            ends.append(state(twin)[0])
        assert copy.deepcopy(model).static_graph
        assert copy.deepcopy(model).bucket_bytes_cap == 3 << 20
        return ends

    zero, one = run_ranks(2, body)
    for a, b in zip(zero, one, strict=True):
        assert_same_bits(a, b)
        assert a[0].eq(0.5).all()


def test_ignored_parameters_and_buffers_are_left_to_others(tmp_path):
    def build():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model.register_buffer("mine", torch.full((2,), float(dist.get_rank())))
        names = ["1.weight", "mine"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return model

    def train(model):
        model(torch.ones(1, 3) * (dist.get_rank() + 1)).sum().backward()
        return state(model), [p.detach().clone() for p in model.module.parameters()]

    def body(file):
        mine = train(DistributedDataParallel(build()))
        with torchs_world(file) as torchs:
            return mine, train(torchs(build()))

    zero, one = run_ranks(2, body, str(tmp_path / "meet"))
    for mine, reference in (zero, one):
        assert_equal(mine, reference)
    assert not torch.equal(zero[0][1][2], one[0][1][2])
    assert one[0][0][1][0].tolist() == [1.0, 1.0]


def test_buffers_at_construction_and_after():
    """`broadcast_buffers` and `forward_sync_buffers`, as in torch: only the first spares the construction."""

    def body():
        rank = dist.get_rank()
        seen = []
        for kwargs in (
            {},
            {"broadcast_buffers": False},
            {"forward_sync_buffers": False},
            {"broadcast_buffers": False, "forward_sync_buffers": True},
            {"init_sync": False},
        ):
            inner = nn.BatchNorm1d(2)
            inner.running_mean += rank
            model = DistributedDataParallel(inner, **kwargs)
            built = float(inner.running_mean[0])
            inner.running_mean.fill_(10.0 + rank)
            model.eval()
            model(torch.ones(2, 2))
            seen.append((built, float(inner.running_mean[0]), model.broadcast_buffers))
        return seen

    zero, one = run_ranks(2, body)
    assert zero == [(0.0, 10.0, True), (0.0, 10.0, False), (0.0, 10.0, False), (0.0, 10.0, True), (0.0, 10.0, True)]
    assert one == [(0.0, 10.0, True), (1.0, 11.0, False), (0.0, 11.0, False), (0.0, 10.0, True), (1.0, 10.0, True)]


def test_buffers_move_as_in_torch_through_no_sync_and_evaluation(tmp_path):
    def train(model):
        generator = torch.Generator().manual_seed(dist.get_rank())
        seen = []
        for what in ("sync", "no_sync", "no_sync", "sync", "eval", "eval", "sync", "sync"):
            x = torch.randn(4, 2, generator=generator)
            model.train(what != "eval")
            if what == "eval":
                with torch.no_grad():
                    model(x)
            elif what == "no_sync":
                with model.no_sync():
                    model(x).square().sum().backward()
            else:
                model(x).square().sum().backward()
            seen.append(state(model))
        return seen

    def body(file):
        mine = train(DistributedDataParallel(nn.BatchNorm1d(2)))
        with torchs_world(file) as torchs:
            return mine, train(torchs(nn.BatchNorm1d(2)))

    for mine, reference in run_ranks(2, body, str(tmp_path / "meet")):
        assert_equal(mine, reference)


def test_buckets_have_the_sizes_that_were_asked_for():
    def body():
        layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(6)))  # 40 kB each
        sizes = []
        for kwargs in ({"bucket_cap_mb": 0.08}, {"bucket_cap_mb_list": [0.04, 0.08], "bucket_cap_mb": 1}, {}):
            buckets = []

            def hook(state, bucket, buckets=buckets):
                buckets.append(bucket.buffer().nbytes // 40_000)
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            model = DistributedDataParallel(layers, **kwargs)
            model.register_comm_hook(None, hook)
            model(torch.ones(1, 100)).sum().backward()
            sizes.append(buckets)
        with pytest.raises(dist.UsageError, match="bucket_cap_mb must be > 0"):
            DistributedDataParallel(layers, bucket_cap_mb_list=[-1])
        return sizes

    assert run_ranks(2, body) == [[[2, 2, 2], [1, 2, 3], [6]]] * 2
