"""Uneven inputs, against torch's join on gloo."""

import contextlib

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.algorithms.ddp_comm_hooks import default_hooks
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks
from support.ddp_rules import assert_equal, assert_same_bits, state, torchs_world


class Net(nn.Module):
    """A buffer that moves, a parameter that is a bucket of its own, and a layer that may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.large = nn.Linear(4, 66_000)
        self.norm, self.extra = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x, extra=True):
        x = self.norm(self.large(x).view(-1, 3, 22_000).tanh().mean(-1))
        return self.extra(x) if extra else x


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def train(model, count, extra=lambda step: True, accumulate=1, **join):
    """What gradients were in each step, and the model after the join."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with model.join(**join):
        for step, x in enumerate(batches(dist.get_rank(), count)):
            last = step % accumulate == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (model(x, extra(step)) ** 3).sum().backward()
            if last:
                seen.append(state(model)[0])
                optimizer.step()
                optimizer.zero_grad()
    return seen, [p.detach().clone() for p in model.module.parameters()], [b.clone() for b in model.module.buffers()]


def means_of(model, loss, inputs, ranks=None):
    """The mean over so many ranks of the gradients that one process gets from each input."""
    for x in inputs:
        loss(model, x).backward()
    return [None if p.grad is None else p.grad / (ranks or len(inputs)) for p in model.parameters()]


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@pytest.mark.parametrize(
    ("kwargs", "accumulate"),
    [
        ({}, 1),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, 1),
        ({"bucket_cap_mb": 0.00001}, 2),
        ({"broadcast_buffers": False}, 1),
    ],
    ids=["plain", "unused", "no_sync", "own buffers"],
)
def test_uneven_inputs_as_in_torch(tmp_path, kwargs, accumulate, divide_by_initial_world_size):
    # The extra layer is left out by rank 2 in a step in which rank 0 has no inputs any more.
    unused = kwargs.get("find_unused_parameters", False)
    counts = (2, 4, 6)

    def body(file):
        rank = dist.get_rank()

        def run(model):
            return train(
                model,
                counts[rank],
                lambda step: not (unused and step == 3 and rank == 2),
                accumulate,
                divide_by_initial_world_size=divide_by_initial_world_size,
            )

        mine = []
        for overlap in (False, True):
            model = DistributedDataParallel(Net(), **kwargs)
            model._reducer.overlap = overlap
            mine.append(run(model))
        # And it can be used on.
        model.zero_grad()
        model(batches(rank, 1)[0]).sum().backward()
        after = state(model)
        with torchs_world(file) as torchs:
            return mine, run(torchs(Net(), **kwargs)), after

    results = run_ranks(3, body, str(tmp_path / "meet"))
    for (mine, again), reference, after in results:
        assert_equal(mine, reference)
        for a, b in zip([*mine[0], *mine[1:]], [*again[0], *again[1:]], strict=True):
            assert_same_bits(a, b)
        assert_same_bits(mine[1], results[0][0][0][1])  # one model at the end, on all ranks
        assert_same_bits(after[0], results[0][2][0])
    if "broadcast_buffers" not in kwargs:
        assert_same_bits(results[0][0][0][2], results[1][0][0][2])


def test_several_forwards_a_backward_and_forwards_without_one():
    """torch's join takes for granted that each forward has its backward."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def loss(model, x):
        return model(x).square().sum() + model(-x).sum()

    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(build())
        seen = []
        with model.join(divide_by_initial_world_size=False):
            for x in batches(rank, 3 if rank else 1):
                model.zero_grad()
                loss(model, x).backward()
                seen.append(state(model)[0])
                with torch.no_grad():
                    model(x)
                model(x)  # for its output only
                x = x.requires_grad_()
                torch.autograd.grad(model(x).square().sum(), x)
        return seen, model.module.state_dict()

    zero, one = run_ranks(2, body)
    torch.testing.assert_close(zero[1], one[1], rtol=0, atol=0)
    for step in range(3):
        means = means_of(build(), loss, [batches(rank, 3)[step] for rank in ((0, 1) if step == 0 else (1,))])
        assert_equal(one[0][step], means)
        if step == 0:
            assert_equal(zero[0][0], means)


def test_static_graph_that_a_rank_learns_while_it_has_no_inputs():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Net(), static_graph=True)
        first = train(model, 2 * rank, lambda step: False)  # rank 0 has none at all
        second = train(model, 2, lambda step: False)
        return first[1:], second, first[0]

    def loss(model, x):
        return (model(x, False) ** 3).sum()

    zero, one = run_ranks(2, body)
    # Rank 0's part is zero; then both begin with what rank 1 has trained.
    assert_equal(one[2][0], means_of(Net(), loss, [batches(1, 1)[0]], 2))
    trained = Net()
    for parameter, value in zip(trained.parameters(), zero[0][0], strict=True):
        parameter.data.copy_(value)
    assert_equal(zero[1][0][0], means_of(trained, loss, [batches(rank, 1)[0] for rank in (0, 1)]))
    for a, b in zip(zero[0], one[0], strict=True):
        assert_same_bits(a, b)
    for a, b in zip(zero[1][0], one[1][0], strict=True):
        assert_same_bits(a, b)
    assert [g is None for g in zero[1][0][-1]] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("hook", [False, True])
def test_the_first_backward_of_a_rank_that_learnt_from_others_is_judged(hook):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Net(), static_graph=True)
        if hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        train(model, 2 * rank, lambda step: False)
        x = batches(rank, 1)[0]
        with pytest.raises(dist.UsageError) as caught:
            model(x, extra=rank == 0).sum().backward()
        model.zero_grad()
        model(x, extra=False).sum().backward()
        return str(caught.value), state(model)[0]

    zero, one = run_ranks(2, body)
    assert zero[0] == one[0]
    assert "1 gradients instead of 0 to 2 of 6 parameters on rank 0: extra.weight, extra.bias" in zero[0]
    assert_same_bits(zero[1], one[1])


def test_one_join_at_a_time():
    def body():
        one, two = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
        texts = []
        for other in (two, one):
            with pytest.raises(dist.UsageError) as caught, one.join(), other.join():
                raise AssertionError("not reached")
            texts.append(str(caught.value))
        for model in (one, two):
            train_linear(model, 1 + dist.get_rank())
        return texts

    for texts in run_ranks(2, body):
        assert all("joining several models is not supported" in text for text in texts)


def test_what_nobody_with_inputs_uses_stays_none():
    """In torch a rank that has run out still counts what it used last."""

    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        seen, *_ = train(model, 1 if rank else 2, lambda step: step == 0)
        return [[g is None for g in gradients] for gradients in seen]

    zero, one = run_ranks(2, body)
    assert zero == [[False] * 6, [False] * 4 + [True] * 2]
    assert one == [[False] * 6]


def test_hooks_are_called_by_ranks_without_inputs_too():
    def body():
        calls = []

        def hook(group, bucket):
            calls.append((bucket.index(), bucket.is_last()))
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0].div_(10))

        model = DistributedDataParallel(Net())
        model.register_comm_hook(None, hook)
        return calls, train(model, 2 + dist.get_rank())[1]

    zero, one = run_ranks(2, body)
    assert zero[0] == one[0]
    assert len(zero[0]) == 3 * (max(index for index, _ in zero[0]) + 1)
    assert_same_bits(zero[1], one[1])


def test_throw_on_early_termination_and_enable():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(RuntimeError) as caught:
            train_linear(model, 3 if rank == 1 else 5, throw_on_early_termination=True)
        train_linear(model, 2, throw_on_early_termination=True)  # even inputs
        calls = dist.stats().calls
        with model.join(enable=False):
            pass
        assert dist.stats().calls == calls
        return str(caught.value)

    texts = run_ranks(3, body)
    assert texts[1] == "Rank 1 exhausted all inputs."
    assert (
        texts[0]
        == texts[2]
        == ("Detected at least one rank that exhausted inputs (rank 1). Throwing across all ranks.")
    )


def train_linear(model, count, **join):
    with model.join(**join):
        for x in batches(dist.get_rank(), count):
            model(x).sum().backward()


def test_ranks_with_inputs_must_do_the_same():
    def body():
        model = DistributedDataParallel(nn.Linear(4, 4))

        def different_things():
            with model.join():
                out = model(torch.ones(1, 4))
                if dist.get_rank() == 0:
                    out.sum().backward()
                else:
                    model(torch.ones(1, 4))

        with pytest.raises(dist.MismatchError) as caught:
            different_things()
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert "(rank 0: backward, rank 1: forward)" in texts[0]


def test_an_exception_of_the_user_passes():
    def body():
        model = DistributedDataParallel(nn.Linear(4, 4))

        def broken_off():
            with model.join():
                model(torch.ones(1, 4)).sum().backward()
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            broken_off()
        calls = dist.stats().calls
        model(torch.ones(1, 4))  # nothing is told any more
        return dist.stats().calls - calls

    assert run_ranks(2, body) == [0, 0]


def test_one_rank():
    def body():
        model = DistributedDataParallel(nn.Linear(4, 4))
        with model.join():
            model(torch.ones(1, 4)).sum().backward()
        return state(model)[0]

    ((weight, bias),) = run_ranks(1, body)
    assert_same_bits([weight, bias], [torch.ones(4, 4), torch.ones(4)])
