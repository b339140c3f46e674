"""Uneven inputs, compared with the join of torch on gloo."""

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
    """A model with a changing buffer, a parameter in a separate bucket, and an optional layer."""

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
    """Return the gradients of each step, and the parameters and buffers after the join."""
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
    """Return the gradients of one process, summed over the inputs and divided by the number of ranks."""
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
def test_uneven_inputs_give_the_results_of_torch(tmp_path, kwargs, accumulate, divide_by_initial_world_size):
    # Rank 2 omits the extra layer in a step in which rank 0 has no more inputs.
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
        # The model stays usable after the join.
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
        assert_same_bits(mine[1], results[0][0][0][1])  # all ranks have equal parameters at the end
        assert_same_bits(after[0], results[0][2][0])
    if "broadcast_buffers" not in kwargs:
        assert_same_bits(results[0][0][0][2], results[1][0][0][2])


def test_join_allows_several_forwards_and_forwards_without_backward():
    """Run forwards and backwards in different numbers. torch's join requires one backward per forward."""

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


def test_rank_without_inputs_learns_the_static_graph_from_others():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Net(), static_graph=True)
        first = train(model, 2 * rank, lambda step: False)  # rank 0 has no inputs
        second = train(model, 2, lambda step: False)
        return first[1:], second, first[0]

    def loss(model, x):
        return (model(x, False) ** 3).sum()

    zero, one = run_ranks(2, body)
    # The contribution of rank 0 is zero. Then both ranks continue from the parameters that rank 1 has trained.
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
def test_first_backward_of_a_rank_is_checked_against_the_learned_graph(hook):
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


def test_nested_joins_are_refused():
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


def test_gradients_unused_by_ranks_with_inputs_stay_none():
    """Check which gradients are None. In torch, a rank without inputs still counts the parameters of its last step."""

    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        seen, *_ = train(model, 1 if rank else 2, lambda step: step == 0)
        return [[g is None for g in gradients] for gradients in seen]

    zero, one = run_ranks(2, body)
    assert zero == [[False] * 6, [False] * 4 + [True] * 2]
    assert one == [[False] * 6]


def test_ranks_without_inputs_call_hooks_too():
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


def test_throw_on_early_termination_raises_and_enable_false_sends_nothing():
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


def test_different_calls_of_ranks_with_inputs_are_a_mismatch():
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


def test_exception_in_join_propagates_unchanged():
    def body():
        model = DistributedDataParallel(nn.Linear(4, 4))

        def broken_off():
            with model.join():
                model(torch.ones(1, 4)).sum().backward()
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            broken_off()
        calls = dist.stats().calls
        model(torch.ones(1, 4))  # sends nothing after the join
        return dist.stats().calls - calls

    assert run_ranks(2, body) == [0, 0]


def test_join_with_one_rank_computes_local_gradients():
    def body():
        model = DistributedDataParallel(nn.Linear(4, 4))
        with model.join():
            model(torch.ones(1, 4)).sum().backward()
        return state(model)[0]

    ((weight, bias),) = run_ranks(1, body)
    assert_same_bits([weight, bias], [torch.ones(4, 4), torch.ones(4)])
