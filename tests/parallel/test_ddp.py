"""DistributedDataParallel on several ranks, compared with one process on the whole batch."""

import copy
import gc

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks
from support.ddp_rules import torchs_world

# Tolerance relative to the largest element: several ranks add in another order than one process.
FLOAT64 = 1e-12


class Model(nn.Module):
    """A model with parameters of all kinds: large (one bucket each), small, scalar, strided, tied and frozen."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(16, 10_000)
        self.back = nn.Linear(10_000, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.small = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.small[0].weight

    def forward(self, x):
        x = torch.tanh(self.back(torch.tanh(self.large(x))))
        x = x + self.conv(x[:, None, None, :]).mean(dim=(1, 2))
        for layer in (*self.small, self.frozen, self.tied):
            x = torch.tanh(layer(x)) * self.scale
        return x


def data(rows=24):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return x, y


def make(seed=0):
    torch.manual_seed(seed)
    return Model().double()


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_near(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= FLOAT64 * b.abs().max()


def assert_same_bits(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train(model, x, y, steps=3, set_to_none=True):
    """Return the gradients after each step, and the weights after the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.mse_loss(model(x), y).backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen, weights(model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_training_equals_one_process_on_the_whole_batch(ranks, mode):
    """Combine all settings for overlap, bucket size and storage of gradients."""
    ways = [
        (overlap, bucket_cap_mb, as_view, set_to_none)
        for overlap in (False, True)
        for bucket_cap_mb in (25, 0.0005)
        for as_view, set_to_none in ((False, True), (True, True), (True, False))
    ]

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        results = []
        for overlap, bucket_cap_mb, as_view, set_to_none in ways:
            model = make(seed=rank)  # the values of rank 0 must win
            model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=as_view, **mode)
            model._reducer.overlap = overlap
            x, y = data()
            results.append(train(model, x[rank::size], y[rank::size], set_to_none=set_to_none))
            if as_view:
                shared = [p.grad.untyped_storage().data_ptr() for p in model.module.small.parameters()]
                assert bucket_cap_mb < 1 or len(set(shared)) == 1
        return results

    results = run_ranks(ranks, body)
    steps, last = train(make(), *data())
    for by_rank in zip(*results, strict=True):
        for seen, final in by_rank:
            assert_near(final, last)
            for got, want in zip(seen, steps, strict=True):
                assert_near(got, want)
            assert_same_bits(final, results[0][0][1])


def test_two_runs_give_equal_weight_bits():
    def body():
        model = DistributedDataParallel(make().float())
        x, y = (t.float()[dist.get_rank() :: dist.get_world_size()] for t in data())
        return train(model, x, y)[1]

    first, second = run_ranks(2, body), run_ranks(2, body)
    assert_same_bits(first[0], first[1])
    assert_same_bits(first[0], second[0])


def test_flat_buckets_keep_their_plans_until_the_model_is_deleted():
    def body():
        x, y = (t[dist.get_rank() :: 2] for t in data())
        model = DistributedDataParallel(make(), bucket_cap_mb=0.001)
        held = [{id(plan) for plan in dist.group.WORLD._plans}]
        for _ in range(3):
            train(model, x, y)
            held.append({id(plan) for plan in dist.group.WORLD._plans})
        del model
        gc.collect()
        return [len(plans) for plans in held], held[1] == held[3], len(dist.group.WORLD._plans)

    for counts, same, left in run_ranks(2, body):
        assert counts[0] == left == 0
        assert counts[1] > 1, "expected several flat buckets"
        assert same, "the plans were created again"


def test_training_equals_torch_ddp_on_gloo(tmp_path):
    def body(file):
        rank = dist.get_rank()
        x, y = (t[rank::2] for t in data())
        mine = train(DistributedDataParallel(make(rank)), x, y)
        with torchs_world(file) as torchs:
            return mine, train(torchs(make(rank)), x, y)

    for mine, reference in run_ranks(2, body, str(tmp_path / "meet")):
        # With two ranks, dividing by 2 before or after the sum gives the same bits.
        assert_same_bits(mine[1], reference[1])
        for a, b in zip(mine[0], reference[0], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("as_view", [False, True])
def test_no_sync_accumulates_locally_until_the_next_synchronized_backward(as_view):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(make(), gradient_as_bucket_view=as_view)
        x, y = (t[rank::2] for t in data())
        before = dist.stats().calls
        with model.no_sync():
            for part in (slice(0, 4), slice(4, 8)):
                (nn.functional.mse_loss(model(x[part]), y[part]) / 3).backward()
        assert dist.stats().calls == before
        local = gradients(model)
        (nn.functional.mse_loss(model(x[8:]), y[8:]) / 3).backward()
        assert dist.stats().calls > before
        first = gradients(model)
        model.zero_grad()
        # Only no_sync around the forward disables the reduction, as in torch.
        loss = nn.functional.mse_loss(model(x), y)
        with model.no_sync():
            loss.backward()
        return local, first, gradients(model)

    (local0, first0, second0), (local1, first1, second1) = run_ranks(2, body)
    oracle = make()
    nn.functional.mse_loss(oracle(data()[0]), data()[1]).backward()
    for result in (first0, first1, second0, second1):
        assert_near(result, gradients(oracle))
    assert not all(torch.equal(a, b) for a, b in zip(local0, local1, strict=True))


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("wide", torch.zeros(300_000))
        self.register_buffer("none", None)

    def forward(self, x):
        self.steps = self.steps + 1  # replaces the tensor
        return self.norm(self.layer(x))


def test_buffers_are_copied_from_rank_0():
    def body():
        rank = dist.get_rank()
        torch.manual_seed(rank)
        inner = Buffers()
        inner.wide += rank
        inner.mask[rank] = False
        model = DistributedDataParallel(inner)
        states = [copy.deepcopy(inner.state_dict())]
        for _ in range(2):
            inner.steps += rank  # differs between ranks until the next forward
            model(torch.randn(8, 4)).sum().backward()
            states.append(copy.deepcopy(inner.state_dict()))
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))  # as in torch, the first forward after a synchronized one copies the buffers
        states.append(copy.deepcopy(inner.state_dict()))
        calls = dist.stats().calls
        with torch.inference_mode():
            model(torch.randn(8, 4))
        assert dist.stats().calls == calls
        return states

    zero, one = run_ranks(2, body)
    for i in (0, -1):
        torch.testing.assert_close(one[i], zero[i], rtol=0, atol=0)
    assert zero[0]["mask"].tolist() == [False, True, True]
    for a, b in zip(zero[1:-1], one[1:-1], strict=True):
        assert a["steps"] == b["steps"]
        assert not torch.equal(a["norm.running_mean"], b["norm.running_mean"])  # the data differ since then
    assert zero[2]["steps"] == 2


def test_two_forwards_before_a_backward_equal_torch_with_buffers(tmp_path):
    def train(model):
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            one, two = (model(torch.randn(8, 4, generator=generator)) for _ in range(2))
            (one**3 + two**2).sum().backward()
        return gradients(model), copy.deepcopy(model.state_dict())

    def body(file):
        torch.manual_seed(0)
        model = Buffers()
        mine = train(DistributedDataParallel(copy.deepcopy(model)))
        with torchs_world(file) as torchs:
            return mine, train(torchs(model))

    for mine, reference in run_ranks(2, body, str(tmp_path / "meet")):
        torch.testing.assert_close(mine, reference)


def test_broadcast_buffers_false_leaves_buffers_unchanged():
    def body():
        model = DistributedDataParallel(Buffers(), broadcast_buffers=False)
        model.module.steps += 10 * dist.get_rank()
        model(torch.randn(8, 4)).sum().backward()
        return int(model.module.steps)

    assert run_ranks(2, body) == [1, 11]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, both=False):
        return self.used(x) + (self.unused(x) if both else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_parameter_without_gradient_is_an_error_that_names_it(overlap):
    def body():
        model = DistributedDataParallel(Two(), bucket_cap_mb=0.00001)
        model._reducer.overlap = overlap
        x = torch.full((2, 3), 1.0 + dist.get_rank())
        with pytest.raises(
            ValueError,
            match=r"(?s)no gradient to 2 of 4 parameters on ranks 0-1: unused\.weight, unused\.bias\. .*find_unused",
        ):
            model(x).sum().backward()
        # The model stays usable.
        model.zero_grad()
        model(x, both=True).sum().backward()
        return gradients(model)

    zero, one = run_ranks(2, body)
    assert_same_bits(zero, one)
    assert zero[0].unique().item() == 3.0


def test_models_that_differ_are_an_error_on_every_rank():
    def body():
        def build(what):
            rank = dist.get_rank()
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            if rank == 1 and what == "count":
                model.append(nn.Linear(3, 3))
            if rank == 1 and what == "shape":
                model[1] = nn.Linear(3, 4)
            if rank == 1 and what == "dtype":
                model[1].double()
            if rank == 1 and what == "name":
                model = nn.ModuleDict({"0": model[0], "one": model[1]})
            if rank == 1 and what == "frozen":
                model[1].bias.requires_grad_(False)
            if rank == 1 and what == "buffer":
                model.register_buffer("extra", torch.ones(1))
            return model

        messages = {}
        for what in ("count", "shape", "dtype", "name", "frozen", "buffer"):
            with pytest.raises(dist.MismatchError) as caught:
                DistributedDataParallel(build(what))
            messages[what] = str(caught.value)
        # The group still works.
        DistributedDataParallel(build("equal"))
        return messages

    zero, one, two = run_ranks(3, body)
    assert zero == one == two
    assert (
        "Compared with the reference, rank 0 (4 parameters and buffers): rank 1: 6 of them, "
        "first difference at number 4: parameter 2.weight: float32 (3, 3), trained (reference: nothing)"
    ) in zero["count"]
    assert (
        "first difference at number 2: parameter 1.weight: float32 (4, 3), trained "
        "(reference: parameter 1.weight: float32 (3, 3), trained)"
    ) in zero["shape"]
    assert "parameter 1.weight: float64" in zero["dtype"]
    assert "parameter one.weight" in zero["name"]
    assert "parameter 1.bias: float32 (3,) (reference: parameter 1.bias: float32 (3,), trained)" in zero["frozen"]
    assert "first difference at number 4: buffer extra" in zero["buffer"]


@pytest.mark.parametrize("overlap", [False, True])
def test_model_stays_usable_after_an_exception_in_backward(overlap):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(make(), bucket_cap_mb=0.0005)
        model._reducer.overlap = overlap
        x, y = (t[rank::2] for t in data())
        broken = model.module.small[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nn.functional.mse_loss(model(x), y).backward()
        broken.remove()
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        return gradients(model)

    oracle = make()
    nn.functional.mse_loss(oracle(data()[0]), data()[1]).backward()
    for result in run_ranks(2, body):
        assert_near(result, gradients(oracle))


class Weighted(nn.Module):
    """A model with a parameter that only the loss uses, and with activation checkpoints."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 8)
        self.log_sigma = nn.Parameter(torch.tensor(0.3))
        self.reentrant = reentrant

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        hidden = torch.tanh(self.first(x))
        if self.reentrant is None:
            return {"out": [torch.tanh(self.second(hidden))]}
        return {"out": [checkpoint(lambda h: torch.tanh(self.second(h)), hidden, use_reentrant=self.reentrant)]}


def weighted_loss(model, x, y):
    inner = getattr(model, "module", model)
    return nn.functional.mse_loss(model(x)["out"][0], y) * torch.exp(-inner.log_sigma) + inner.log_sigma


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_parameters_of_the_loss_and_activation_checkpoints_are_reduced(reentrant):
    def make_weighted():
        torch.manual_seed(0)
        return Weighted(reentrant).double()

    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_weighted())
        x, y = (t[rank::2] for t in data())
        weighted_loss(model, x, y).backward()
        return gradients(model)

    oracle = make_weighted()
    weighted_loss(oracle, *data()).backward()
    for result in run_ranks(2, body):
        assert_near(result, gradients(oracle))


@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_several_forwards_and_backwards_give_correct_gradients(mode):
    def body():
        rank = dist.get_rank()
        x, y = (t[rank::2] for t in data())
        results = []

        model = DistributedDataParallel(make(), **mode)  # the same graph twice
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))

        model.zero_grad()  # two graphs, two backwards
        one, two = (nn.functional.mse_loss(model(x), y) for _ in range(2))
        one.backward()
        two.backward()
        results.append(gradients(model))

        model.zero_grad()  # two graphs, one backward
        (nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(x), y)).backward()
        results.append(gradients(model))

        model.zero_grad()  # a gradient with respect to the input, as in the gradient penalty of GANs
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        assert slope.shape == x.shape
        (2 * nn.functional.mse_loss(output, y)).backward()
        results.append(gradients(model))

        model.zero_grad()  # an evaluation in between
        loss = 2 * nn.functional.mse_loss(model(x), y)
        with torch.no_grad():
            model(x)
        loss.backward()
        results.append(gradients(model))
        return results

    oracle = make()
    (2 * nn.functional.mse_loss(oracle(data()[0]), data()[1])).backward()
    for results in run_ranks(2, body):
        assert len(results) == 5
        for result in results:
            assert_near(result, gradients(oracle))


def test_state_dicts_copies_pickles_and_rewrapped_modules_train():
    def body():
        import gc
        import io

        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)).double()  # importable, for pickle
        model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        assert list(model.state_dict()) == ["module." + name for name in model.module.state_dict()]
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        x, y = (t[dist.get_rank() :: 2] for t in data())
        nn.functional.mse_loss(model(x), y).backward()
        want = gradients(model)

        twin = copy.deepcopy(model)
        twin.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        assert_same_bits(gradients(twin), want)

        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.zero_grad()
        nn.functional.mse_loss(loaded(x), y).backward()
        assert_same_bits(gradients(loaded), want)

        # Without a wrapper the module trains locally. With a new wrapper the gradients are averaged only once.
        del model
        gc.collect()
        calls = dist.stats().calls
        inner.zero_grad()
        nn.functional.mse_loss(inner(x), y).backward()
        assert dist.stats().calls == calls
        assert not torch.equal(gradients(inner)[0], want[0])
        again = DistributedDataParallel(inner)
        again.zero_grad()
        nn.functional.mse_loss(again(x), y).backward()
        assert_same_bits(gradients(again), want)

    run_ranks(2, body)


def test_one_rank_sends_nothing():
    def body():
        calls = dist.stats().calls
        model = DistributedDataParallel(make())
        result = train(model, *data())
        # Compute the reference in this process: another number of threads could change the rounding of sums.
        return dist.stats().calls - calls, result, train(make(), *data())

    ((calls, (seen, last), (steps, weights)),) = run_ranks(1, body)
    assert calls == 0
    assert_same_bits(last, weights)
    assert_same_bits(seen[-1], steps[-1])


def test_unsupported_options_and_modules_are_refused():
    def body():
        model = nn.Linear(2, 2)
        refused = ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh")
        for name in refused:
            with pytest.raises(dist.UsageError, match=f"{name} is not supported"):
                DistributedDataParallel(model, **{name: object()})
        with pytest.raises(TypeError, match="no_such_thing"):
            DistributedDataParallel(model, no_such_thing=1)
        # torch also refuses these options, with the same exception types.
        for kwargs, kind, text in (
            ({"device_ids": [0]}, ValueError, "device_ids and output_device only work with GPU modules"),
            ({"output_device": 0}, ValueError, "device_ids and output_device only work with GPU modules"),
            ({"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
            ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be > 0"),
        ):
            with pytest.raises(kind, match=text):
                DistributedDataParallel(model, **kwargs)
        for module, kind, text in (
            (
                nn.Linear(2, 2).requires_grad_(False),
                RuntimeError,
                "doesn't have any parameter that requires a gradient",
            ),
            (nn.Module(), RuntimeError, "doesn't have any parameter that requires a gradient"),
            (nn.LazyLinear(2), RuntimeError, "uninitialized parameters"),
            (nn.SyncBatchNorm(2), ValueError, "SyncBatchNorm layers only work with GPU modules"),
            (nn.Linear(2, 2, device="meta"), RuntimeError, "the module's parameters are on meta"),
        ):
            with pytest.raises(kind, match=text):
                DistributedDataParallel(module)
        # Options without effect are accepted.
        DistributedDataParallel(model, device_ids=[], dim=1, check_reduction=True, batched_grad_copy=True)
        for kind in (nn.Embedding, nn.EmbeddingBag):
            layer = kind(4, 2, sparse=True)
            with pytest.raises(dist.UsageError, match=rf"Omit sparse=True in 0 \({kind.__name__}\)"):
                DistributedDataParallel(nn.Sequential(layer))
            DistributedDataParallel(nn.Sequential(layer.requires_grad_(False), nn.Linear(2, 2)))
        late = DistributedDataParallel(nn.Embedding(4, 2))
        late.module.sparse = True
        with pytest.raises(dist.UsageError, match="sparse"):
            late(torch.tensor([1])).sum().backward()

    run_ranks(2, body)


def test_several_backwards_of_one_forward_are_an_error_with_advice():
    def body():
        inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        inner.forward = lambda x: [layer(x).sum() for layer in inner]
        model = DistributedDataParallel(inner)
        first, _ = model(torch.ones(1, 2))
        with pytest.raises(dist.UsageError, match=r"several backwards follow one forward.* add the losses and call"):
            first.backward()
        model = DistributedDataParallel(inner, find_unused_parameters=True)  # as the error advises
        model.zero_grad()
        for loss in model(torch.ones(1, 2) * dist.get_rank()):
            loss.backward()
        return [g.unique().tolist() for g in gradients(model)]

    assert run_ranks(2, body) == [[[0.5], [1.0]] * 2] * 2


def test_ddp_without_a_process_group_raises():
    with pytest.raises(dist.NotInitializedError, match="init_process_group"):
        DistributedDataParallel(nn.Linear(2, 2))


def test_init_sync_false_sends_no_parameters():
    def body():
        moved = dist.stats().bytes
        DistributedDataParallel(make(dist.get_rank()), init_sync=False)
        return dist.stats().bytes - moved

    assert all(moved < 100 for moved in run_ranks(2, body))  # only the exchange about bucket memory, no parameters
