"""Which backwards average gradients: every backward that trains the model on all ranks, and no other.

If DistributedDataParallel cannot average, replicas must not differ silently: every rank raises an error.
"""

import warnings

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks

RANKS = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def data(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def penalty(model, x):
    """Return the gradient penalty: the squared distance of the slope from 1. Its backward reaches no model output."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def loss(model, x):
    return model(x).square().mean()


def assert_means(model, reference, losses):
    """Check that the gradients are the means over the ranks, as one process computes them."""
    reference.zero_grad()
    (sum(losses(reference, data(rank)) for rank in range(RANKS)) / RANKS).backward()
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        if wanted.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, wanted.grad)


def values_of_all(model):
    mine = [parameter.detach().clone() for parameter in model.parameters()]
    everyones = [None] * RANKS
    dist.all_gather_object(everyones, mine)
    return everyones


def assert_same_everywhere(model):
    first, *others = values_of_all(model)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("overlap", [False, True])
def test_input_gradients_on_one_rank_start_no_reduction(overlap):
    def body():
        for options in OPTIONS:
            model = DistributedDataParallel(net(), **options)
            model.overlap = overlap
            for _ in range(3):
                if dist.get_rank() == 0:
                    for way in ("grad", "backward"):
                        x = data(0).requires_grad_()
                        if way == "grad":
                            torch.autograd.grad(model(x).sum(), x)
                        else:
                            model(x).sum().backward(inputs=[x])
                model.zero_grad()
                loss(model, data(dist.get_rank())).backward()
                assert_means(model, net(), loss)

    run_ranks(RANKS, body)


def test_gradients_of_a_gradient_penalty_are_reduced():
    def body():
        model = DistributedDataParallel(net(), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            penalty(model, data(dist.get_rank())).backward()
            assert_means(model, net(), penalty)

    run_ranks(RANKS, body)


def hang_on(parameters):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})


@pytest.mark.parametrize("after", [False, True])
def test_optimizers_applied_in_backward_step_with_the_mean(after):
    def body():
        for options in (*OPTIONS, {"gradient_as_bucket_view": True}):
            inner, reference = net(), net()
            if not after:
                hang_on(inner.parameters())
            model = DistributedDataParallel(inner, **options)
            if after:
                hang_on(inner.parameters())
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            for _ in range(3):
                loss(model, data(dist.get_rank())).backward()
                assert all(parameter.grad is None for parameter in inner.parameters())
                optimizer.zero_grad()
                (sum(loss(reference, data(rank)) for rank in range(RANKS)) / RANKS).backward()
                optimizer.step()
                for mine, wanted in zip(inner.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine, wanted)
            assert_same_everywhere(inner)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_optimizer_in_a_parameter_hook_is_refused_on_every_rank(before, clears):
    """Step in a hook on one rank only. The step would use local gradients, so every rank must raise."""

    def body():
        said = []
        for options in (*OPTIONS, {"gradient_as_bucket_view": True}):
            model = net()

            def hang_on_own(model=model):
                optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

                def step(parameter):
                    optimizers[parameter].step()
                    if clears:
                        parameter.grad = None

                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(step)

            if before and dist.get_rank() == 1:
                hang_on_own()
            wrapper = DistributedDataParallel(model, **options)
            if not before and dist.get_rank() == 1:
                hang_on_own()
            with pytest.raises(dist.UsageError, match="If an optimizer steps in a hook of a parameter") as error:
                loss(wrapper, data(dist.get_rank())).backward()
            said.append(str(error.value))
        return said

    what = "removed from .grad before they were reduced" if clears else "something changed the parameter"
    for said in run_ranks(RANKS, body):
        for each in said:
            assert what in each
            assert "on rank 1: 0.weight, 0.bias, 2.weight, 2.bias" in each


def test_optimizer_may_step_in_a_communication_hook():
    """Step in a communication hook, which has the mean of the gradients."""

    def body():
        model, reference = net(), net()
        wrapper = DistributedDataParallel(model)

        def reduce_and_step(state, bucket):
            def step(future):
                with torch.no_grad():
                    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                        parameter.sub_(gradient, alpha=0.1)
                return future.value()[0]

            return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True).get_future().then(step)

        wrapper.register_comm_hook(None, reduce_and_step)
        loss(wrapper, data(dist.get_rank())).backward()
        (sum(loss(reference, data(rank)) for rank in range(RANKS)) / RANKS).backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)

    run_ranks(RANKS, body)


WAYS = {
    "past the wrapper": lambda model, x: loss(model.module, x).backward(),
    "in no_sync": lambda model, x: without_sync(model, x),
    "a second backward": lambda model, x: (loss(model, x).backward(), loss(model.module, x).backward()),
}


def without_sync(model, x):
    with model.no_sync():
        loss(model, x).backward()


@pytest.mark.parametrize("way", WAYS)
def test_next_reduction_detects_replicas_that_differ(way):
    def body():
        for options in OPTIONS:
            model = DistributedDataParallel(net(), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = data(dist.get_rank())
            loss(model, x).backward()
            optimizer.step()
            WAYS[way](model, x)
            optimizer.step()
            with pytest.raises(dist.MismatchError, match=r"models: 0\.weight\[0, 0\] is .* too\."):
                loss(model, x).backward()

    run_ranks(RANKS, body)


def test_unreduced_gradients_are_no_error_if_replicas_stay_equal():
    """Accumulate gradients, drop them, or compute equal gradients on all ranks.

    Parameters are compared only if an optimizer has used unreduced gradients.
    """

    def body():
        from allranks.parallel import reducer

        compared = []
        reducer.require_same_values = lambda named, group: compared.append(named)
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = data(dist.get_rank())
        for _ in range(2):
            without_sync(model, x)  # accumulated
            loss(model, x).backward()
            optimizer.step()
            loss(model.module, x).backward()  # dropped
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not compared
        loss(model, x).backward()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # the same on all ranks
        optimizer.step()
        loss(model, x).backward()
        assert len(compared) == 1
        assert_same_everywhere(model)

    run_ranks(RANKS, body)


def test_training_without_the_wrapper_warns_at_the_call_site():
    def body():
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                loss(model.module, data(dist.get_rank())).backward()
                optimizer.step()
        return [(each.filename, str(each.message)) for each in seen]

    for ((filename, text),) in run_ranks(RANKS, body):
        assert filename == __file__
        assert "If the program calls the wrapped module instead of its wrapper" in text


def test_parameter_without_elements_may_be_unused():
    class WithEmpty(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = net()
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            return self.used(x)

    def body():
        for options in OPTIONS:
            model = DistributedDataParallel(WithEmpty(), **options)
            loss(model, data(dist.get_rank())).backward()
            assert_means(model.module.used, net(), loss)

    run_ranks(RANKS, body)


MOVES = {
    "there and back": lambda model: model.double().float(),
    "half": lambda model: model.half().float(),
    "layout": lambda model: model.to(memory_format=torch.channels_last),
    "memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("as_view", [False, True])
def test_model_whose_memory_moves_after_wrapping_is_still_reduced(as_view):
    """Move a model in which small parameters share a bucket and the last layer has a separate bucket."""

    def convolutions():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 512, 3))

    def images(rank):
        return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))

    def body():
        for move in MOVES.values():
            model, reference = DistributedDataParallel(convolutions(), gradient_as_bucket_view=as_view), convolutions()
            for step in range(3):
                for each in (model, reference):
                    each.zero_grad()
                loss(model, images(dist.get_rank())).backward()
                (sum(loss(reference, images(rank)) for rank in range(RANKS)) / RANKS).backward()
                for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, wanted.grad)
                if step == 0:
                    move(model), move(reference)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("how", ["all of a step", "the wrapper", "the model"])
def test_compiled_models_wrappers_and_steps_are_reduced(how):
    def body():
        inner, reference = net(), net()
        model = DistributedDataParallel(torch.compile(inner, backend="eager") if how == "the model" else inner)
        compiled = torch.compile(model, backend="eager") if how == "the wrapper" else model

        def step(x):
            loss(compiled, x).backward()

        if how == "all of a step":
            step = torch.compile(step, backend="eager")
        for _ in range(2):
            model.zero_grad()
            step(data(dist.get_rank()))
            assert_means(inner, reference, loss)

    run_ranks(RANKS, body)


def test_compiled_autograd_is_refused():
    """Refuse compiled autograd, because it calls none of the hooks that start a reduction."""

    def body():
        import torch._dynamo

        model = DistributedDataParallel(net())

        def step(x):
            loss(model, x).backward()

        with (
            torch._dynamo.config.patch(compiled_autograd=True),
            pytest.raises(dist.UsageError, match=r"Set torch\._dynamo\.config\.compiled_autograd = False"),
        ):
            torch.compile(step, backend="eager")(data(dist.get_rank()))

    run_ranks(RANKS, body)
