"""Models of all kinds: mixed and complex dtypes, groups, state dicts of torch, layers that are used twice."""

import copy
import io

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks
from support.ddp_rules import assert_equal, assert_same_bits, state, torchs_world


class Mixed(nn.Module):
    """A model with parameters of each dtype, shared and reused layers, an empty and a frozen parameter."""

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


def test_mixed_dtypes_and_shared_reused_and_frozen_parameters_equal_torch(tmp_path):
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


@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
@pytest.mark.parametrize("numel", [3, 300_000])
def test_conversion_after_wrapping_is_an_error_on_every_rank(kwargs, numel):
    def body(who):
        rank = dist.get_rank()
        inner = nn.Sequential(nn.Linear(1, numel), nn.Linear(numel, 1))
        model = DistributedDataParallel(inner, **kwargs)
        model(torch.ones(1, 1)).sum().backward()
        x = torch.ones(1, 1)
        if rank in who:
            model.double()
            x = x.double()
        with pytest.raises(dist.UsageError) as caught:
            model(x).sum().backward()
        # Convert back to float32. The parameters have new memory, and .grad are no longer views of buckets.
        model.float()
        inner.load_state_dict({name: torch.full_like(p, 0.5) for name, p in inner.state_dict().items()})
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 1) * rank).sum().backward()
        return str(caught.value), state(model)[0]

    for who in ((0, 1), (1,)):
        zero, one = run_ranks(2, body, who)
        assert zero[0] == one[0]
        ranks = "ranks 0-1" if len(who) == 2 else "rank 1"
        assert f"gradients of a dtype that has changed since wrapping to 4 of 4 parameters on {ranks}: 0.wei" in zero[0]
        assert "before wrapping" in zero[0]
        assert_same_bits(zero[1], one[1])
        assert zero[1][0].eq(0.25).all()


def test_different_options_are_an_error_that_names_them():
    ways = {
        "find_unused_parameters": True,
        "static_graph": True,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": False,
        "broadcast_buffers": False,
        "bucket_cap_mb": 3,
    }

    def body():
        texts = {}
        for name, value in ways.items():
            with pytest.raises(dist.MismatchError) as caught:
                DistributedDataParallel(nn.BatchNorm1d(2), **({name: value} if dist.get_rank() == 1 else {}))
            texts[name] = str(caught.value)
        DistributedDataParallel(nn.BatchNorm1d(2), **ways)
        return texts

    zero, one = run_ranks(2, body)
    assert zero == one
    for name, value in ways.items():
        said = "bucket caps in bytes=[1048576, 3145728]" if name == "bucket_cap_mb" else f"{name}={value}"
        assert "must pass the same options. Compared with the reference, rank 0: rank 1: " in zero[name]
        assert f"{said} (reference: " in zero[name]


class Talks(torch.autograd.Function):
    """A function with a collective in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@pytest.mark.parametrize("init_sync", [True, False])
def test_either_all_ranks_overlap_or_none(monkeypatch, init_sync):
    def body():
        rank = dist.get_rank()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(5, 7))
        inner.forward = lambda x: inner[2](Talks.apply(inner[1](Talks.apply(inner[0](x)))))
        seen = []
        for cpus in ((1, 1), (1, 1000), (1000, 1000)):
            monkeypatch.setattr("allranks.parallel.ddp.usable_cpus", lambda cpus=cpus: cpus[rank])
            model = DistributedDataParallel(inner, init_sync=init_sync, bucket_cap_mb=0.00001)
            assert model._reducer.overlap == model.overlap
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            seen.append((model.overlap, state(model)[0]))
        model.overlap = False
        assert not model._reducer.overlap
        assert not copy.deepcopy(model).overlap
        return seen

    zero, one = run_ranks(2, body)
    assert [overlap for overlap, _ in zero] == [overlap for overlap, _ in one] == [False, False, True]
    for (_, a), (_, b) in zip(zero, one, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a, zero[0][1])


def test_strides_may_differ_between_ranks():
    def body():
        rank = dist.get_rank()
        torch.manual_seed(rank)
        inner = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Conv2d(7, 5_000, 3))  # one small and one large weight
        if rank == 1:
            inner = inner.to(memory_format=torch.channels_last)
        model = DistributedDataParallel(inner)
        torch.manual_seed(3 + rank)
        model(torch.randn(1, 3, 5, 5)).square().sum().backward()
        return (
            [p.is_contiguous() for p in inner.parameters()],
            [p.detach() for p in inner.parameters()],
            state(model)[0],
        )

    zero, one = run_ranks(2, body)
    assert zero[0] == [True] * 4
    assert one[0] == [False, True] * 2
    assert_same_bits(zero[1], one[1])
    assert_same_bits(zero[2], one[2])


def test_ddp_in_a_group_reports_world_ranks():
    """Use a group of ranks 1 and 3: rank 1 is the source, and errors name world ranks. Other ranks do not take part."""

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
    assert "Compared with the reference, rank 1 (" in one[4][0]
    assert "rank 3: 2 of them, first difference at number 0: parameter weight: float32 (3, 2)" in one[4][0]
    assert "no gradient to 2 of 4 parameters on rank 3: 1.weight, 1.bias" in one[4][1]


def test_state_dicts_are_interchangeable_with_torch(tmp_path):
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


def test_copies_and_pickles_keep_their_options():
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


def test_ignored_parameters_and_buffers_are_not_synchronized(tmp_path):
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


def test_buffer_options_control_construction_and_forward():
    """Combine `broadcast_buffers` and `forward_sync_buffers`: only the first affects construction, as in torch."""

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


def test_buffers_equal_torch_with_no_sync_and_evaluation(tmp_path):
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


def test_buckets_have_the_requested_sizes():
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
