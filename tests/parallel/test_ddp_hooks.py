"""Communication hooks of DistributedDataParallel."""

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.algorithms.ddp_comm_hooks import default_hooks
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks
from support.ddp_rules import assert_equal, assert_same_bits, state, torchs_world


class Net(nn.Module):
    """A model with several buckets, one of which contains a single parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.large, self.small = nn.Linear(4, 66_000), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x):
        return self.small(self.large(x).view(-1, 3, 22_000).tanh().mean(-1))


def train(model, steps=2):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model.zero_grad()
        (model(torch.randn(4, 4, generator=generator)) ** 3).sum().backward()
    return state(model)[0]


HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}], ids=str)
def test_default_hooks_equal_plain_ddp_and_torch(tmp_path, kwargs):
    def body(file):
        mine = {}
        for overlap in (False, True):
            for name in HOOKS:
                model = DistributedDataParallel(Net(), bucket_cap_mb=0.00001, **kwargs)
                model._reducer.overlap = overlap
                hook = getattr(default_hooks, name)
                model.register_comm_hook(dist.group.WORLD if name.startswith("fp") else None, hook)
                mine[overlap, name] = train(model)
        wrapped = {}
        for name in ("fp16_compress_wrapper", "bf16_compress_wrapper"):
            model = DistributedDataParallel(Net(), bucket_cap_mb=0.00001, **kwargs)
            model.register_comm_hook(None, getattr(default_hooks, name)(default_hooks.allreduce_hook))
            wrapped[name] = train(model)
        plain = train(DistributedDataParallel(Net(), bucket_cap_mb=0.00001, **kwargs))
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs_hooks

        with torchs_world(file) as torchs:
            model = torchs(Net(), **kwargs)
            model.register_comm_hook(None, torchs_hooks.fp16_compress_hook)
            return mine, wrapped, plain, train(model)

    results = run_ranks(2, body, str(tmp_path / "meet"))
    for mine, wrapped, plain, torchs_half in results:
        for overlap in (False, True):
            assert_same_bits(mine[overlap, "allreduce_hook"], plain)
            for got, want in zip(mine[overlap, "fp16_compress_hook"], torchs_half, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)  # two roundings to 11 bits
            for kind, digits in (("fp16", 1e-3), ("bf16", 8e-3)):
                half = mine[overlap, f"{kind}_compress_hook"]
                assert_same_bits(half, wrapped[f"{kind}_compress_wrapper"])
                assert any(not torch.equal(a, b) for a, b in zip(half, plain, strict=True))
                for got, want in zip(half, plain, strict=True):
                    assert got.dtype == torch.float32
                    torch.testing.assert_close(got, want, rtol=2 * digits, atol=1e-6)
        for key, gradients in mine.items():
            assert_same_bits(gradients, results[0][0][key])


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
def test_compression_keeps_imaginary_parts(name):
    def loss(parameter, x):
        turned = parameter * x
        return turned.imag.sum() + turned.real.sum()

    def body():
        rank = dist.get_rank()
        ends = []
        for numel in (3, 150_000):  # in a flat bucket, and in a separate bucket
            inner = nn.Module()
            inner.one, inner.two = (nn.Parameter(torch.zeros(numel, dtype=torch.complex64)) for _ in range(2))
            inner.forward = lambda x, inner=inner: loss(inner.one, x) + loss(inner.two, x)
            model = DistributedDataParallel(inner)
            model.register_comm_hook(None, getattr(default_hooks, name))
            model(torch.tensor(1 + 3j * rank)).backward()
            ends += state(model)[0]
        return ends

    parameter = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    loss(parameter, torch.tensor([1, 1 + 3j])).backward()
    mean = parameter.grad.mean()
    assert mean.imag != 0
    for ends in run_ranks(2, body):
        assert len(ends) == 4
        assert all(gradient.eq(mean).all() for gradient in ends)


def test_hook_receives_the_gradients_of_each_bucket():
    def body():
        seen = []

        def hook(state, bucket):
            assert state == "mine"
            assert bucket.buffer().dim() == 1
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                assert torch.equal(gradient, parameter.grad)
                gradient.fill_(7)  # a view
            assert bucket.buffer().eq(7).all()
            with_other = bucket.buffer() + 1
            bucket.set_buffer(with_other)
            assert bucket.buffer() is with_other
            assert bucket.gradients()[0].eq(8).all()
            bucket.set_buffer(torch.zeros(0))
            with pytest.raises(dist.UsageError, match="elements, but the buffer that was set has 0"):
                bucket.gradients()
            seen.append((bucket.index(), bucket.is_last(), [p.shape for p in bucket.parameters()]))
            future = torch.futures.Future()
            future.set_result(with_other)
            return future

        model = DistributedDataParallel(Net(), bucket_cap_mb=0.00001)
        model.register_comm_hook("mine", hook)
        (model(torch.randn(4, 4)) ** 3).sum().backward()
        assert all(g.eq(8).all() for g in state(model)[0])
        return seen

    (one,) = run_ranks(1, body)  # a single rank calls the hook, too
    zero, other = run_ranks(2, body)
    assert zero == other == one
    assert [index for index, _, _ in zero] == list(range(len(zero)))
    assert [last for _, last, _ in zero] == [False] * (len(zero) - 1) + [True]
    assert len(zero) > 2
    assert sum(len(shapes) for _, _, shapes in zero) == 6


def test_hook_may_make_calls_in_callbacks():
    """Make the second call of each bucket in a callback. No rank may start another bucket between the two calls."""

    def body():
        def hook(group, bucket):
            first = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()

            def second(future):
                (tensor,) = future.value()
                dist.all_reduce(tensor, group=group)
                return tensor.div_(dist.get_world_size() ** 2)

            return first.then(second)

        model = DistributedDataParallel(Net(), bucket_cap_mb=0.00001)
        model._reducer.overlap = dist.get_rank() == 0
        model.register_comm_hook(None, hook)
        return train(model), train(DistributedDataParallel(Net()))

    for got, plain in run_ranks(2, body):
        assert_equal(got, plain)


def wrong(kind):
    def hook(state, bucket):
        if kind == "raises":
            raise KeyError("mine")
        if kind == "no future":
            return bucket.buffer()
        future = torch.futures.Future()
        if kind == "callback raises":
            future.set_result(0)
            return future.then(lambda _: 1 / 0)
        if kind == "exception in it":
            future.set_exception(ValueError("late"))
            return future
        future.set_result({"no tensor": None, "too short": bucket.buffer()[:-1], "two": [bucket.buffer()] * 2}[kind])
        return future

    return hook


def test_failing_hooks_raise_errors_that_name_the_hook():
    def body():
        texts = {}
        for kind in ("raises", "no future", "callback raises", "exception in it", "no tensor", "too short", "two"):
            model = DistributedDataParallel(nn.Linear(2, 2))
            model.register_comm_hook(None, wrong(kind))
            loss = model(torch.ones(1, 2)).sum()
            with pytest.raises(dist.UsageError) as caught:
                loss.backward()
            texts[kind] = str(caught.value)
        return texts

    for texts in run_ranks(2, body):
        assert all(
            text.startswith("DistributedDataParallel: communication hook wrong.<locals>.hook, bucket 0: ")
            for text in texts.values()
        )
        assert "raised KeyError: 'mine'" in texts["raises"]
        assert "must return a torch.futures.Future object, but got Tensor" in texts["no future"]
        assert "ZeroDivisionError" in texts["callback raises"]
        assert "failed with ValueError: late" in texts["exception in it"]
        assert "must hold a tensor, but holds a NoneType" in texts["no tensor"]
        assert "must hold 6 elements, as the bucket does, but holds 5" in texts["too short"]
        assert "must hold a tensor, but holds a list" in texts["two"]


def test_invalid_hooks_are_refused():
    def body():
        model = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook(None, "no function")

        def annotated(state, bucket: int):
            raise AssertionError("not called")

        def returning(state, bucket) -> int:
            raise AssertionError("not called")

        for hook, text in ((annotated, "bucket annotation should be"), (returning, "return annotation should be")):
            with pytest.raises(ValueError, match=text):
                model.register_comm_hook(None, hook)

        def good(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return default_hooks.allreduce_hook(state, bucket)

        def torchs(state, bucket: "torch.distributed.GradBucket") -> "torch.futures.Future[torch.Tensor]":
            return default_hooks.allreduce_hook(state, bucket)

        model.register_comm_hook(None, good)
        with pytest.raises(RuntimeError, match="can only be called once"):
            model.register_comm_hook(None, good)
        DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, torchs)
        # If the hook passes an invalid group, the call in the hook raises its own error.
        other = DistributedDataParallel(nn.Linear(2, 2))
        other.register_comm_hook(3, default_hooks.allreduce_hook)
        loss = other(torch.ones(1, 2)).sum()
        with pytest.raises(dist.UsageError, match="group must be a ProcessGroup"):
            loss.backward()

    run_ranks(2, body)
