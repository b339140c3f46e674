"""Unused parameters: found, learned with a static graph, or reported by an error that names them and the ranks."""

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel
from allranks.testing import run_ranks
from support.ddp_rules import assert_equal, assert_same_bits, state, torchs_world


@dataclasses.dataclass
class Out:
    main: torch.Tensor
    more: dict


class Branches(nn.Module):
    """A model whose caller selects the layers to use. One layer has a separate bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 300_000), nn.Linear(4, 4)])

    def forward(self, x, which):
        outs = [self.layers[i](x).tanh().mean() for i in which]
        return Out(outs[0], {"list": [outs[1:]], "tuple": (x, None, "text")})


def loss_of(out, scale=1.0):
    return scale * (out.main + sum(out.more["list"][0], torch.zeros(())))


# The layers that each of three ranks uses, by step.
STEPS = [
    ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
    ([0], [0, 1], [2, 0]),
    ([3], [3], [3]),
    ([0, 2], [0], [0]),
    ([1], [2], [3]),
]


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("zeroing", ["to None", "to zero", "never"])
def test_unused_parameters_equal_torch(tmp_path, as_view, zeroing):
    kwargs = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view, "bucket_cap_mb": 0.0001}

    def train(model):
        rank = dist.get_rank()
        x = torch.linspace(-1, 1, 8).view(2, 4) * (rank + 1)
        seen = []
        for step in STEPS:
            loss_of(model(x, step[rank])).backward()
            seen.append(state(model))
            if zeroing != "never":
                model.zero_grad(set_to_none=zeroing == "to None")
        return seen

    def body(file):
        mine = train(DistributedDataParallel(Branches(), **kwargs))
        with torchs_world(file) as torchs:
            return mine, train(torchs(Branches(), **kwargs))

    results = run_ranks(3, body, str(tmp_path / "meet"))
    for mine, reference in results:
        assert_equal(mine, reference)
        for (a, _), (b, _) in zip(mine, results[0][0], strict=True):
            assert_same_bits(a, b)
    if zeroing == "to None":
        kept = [[g is None for g in gradients] for gradients, _ in results[0][0]]
        assert kept[2] == [True] * 6 + [False] * 2  # used by no rank: None


def test_gradient_unused_on_all_ranks_is_unchanged():
    """Use gradients that differ between ranks. A mean of equal gradients would not be visible."""

    def body():
        ends = []
        for as_view in (False, True):
            model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
            loss_of(model(torch.ones(1, 4) / 3, [0, 1])).backward()
            for parameter in model.module.layers[0].parameters():
                parameter.grad += dist.get_rank()
            before = state(model)[0][:2]
            for _ in range(5):
                loss_of(model(torch.ones(1, 4), [1])).backward()
            ends.append((before, state(model)[0][:2]))
        return ends

    for ends in run_ranks(3, body):
        for before, after in ends:
            assert_same_bits(after, before)


def test_parameters_used_only_in_no_sync_count_as_used(tmp_path):
    def train(model):
        rank = dist.get_rank()
        x = torch.ones(2, 4) * (rank + 1)
        with model.no_sync():
            loss_of(model(x, [0] if rank else [1])).backward()
        loss_of(model(x, [3])).backward()
        return state(model)

    def body():
        return train(DistributedDataParallel(Branches(), find_unused_parameters=True))

    zero, one = run_ranks(2, body)
    assert_same_bits(zero[0], one[0])
    oracle = [Branches() for _ in range(2)]
    for rank, model in enumerate(oracle):
        x = torch.ones(2, 4) * (rank + 1)
        (loss_of(model(x, [0] if rank else [1])) + loss_of(model(x, [3]))).backward()
    both = [[p.grad for p in model.parameters()] for model in oracle]
    for got, a, b in zip(zero[0], *both, strict=True):
        assert (got is None) == (a is None and b is None)
        if got is not None:
            zeros = torch.zeros_like(got)
            torch.testing.assert_close(got, ((zeros if a is None else a) + (zeros if b is None else b)) / 2)


def test_unused_outputs_and_ranks_without_used_parameters_are_reduced():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Branches(), find_unused_parameters=True)
        x = torch.ones(2, 4, requires_grad=True)
        model(x, [0, 1]).main.backward()  # layer 1 contributes to an output, but not to the loss
        first = state(model)[0]
        model.zero_grad()
        out = model(x * 1, [0] if rank == 0 else [1])
        # The loss of rank 1 uses no parameter, only a tensor that passes through the forward unchanged.
        (out.main if rank == 0 else out.more["tuple"][0].sum()).backward()
        return first, state(model)[0]

    zero, one = run_ranks(2, body)
    for a, b in zip(zero, one, strict=True):
        assert_same_bits(a, b)
    assert [g is None for g in zero[0]] == [False] * 2 + [True] * 6
    assert [g is None for g in zero[1]] == [False] * 2 + [True] * 6
    torch.testing.assert_close(zero[1][0] * 2, zero[0][0])


@pytest.mark.parametrize("overlaps", [(False, False, False), (True, True, True), (True, False, True)])
def test_error_about_unused_parameters_names_parameters_and_ranks(overlaps):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Branches(), bucket_cap_mb=0.00001)
        model._reducer.overlap = overlaps[rank]
        with pytest.raises(RuntimeError) as caught:
            loss_of(model(torch.ones(1, 4), ([0, 1, 2, 3], [0, 1, 2], [0, 2])[rank])).backward()
        model.zero_grad()  # the model stays usable
        loss_of(model(torch.ones(1, 4) * rank, [0, 1, 2, 3])).backward()
        return str(caught.value), state(model)[0]

    results = run_ranks(3, body)
    text = results[0][0]
    assert "no gradient to 2 of 8 parameters on rank 2: layers.1.weight, layers.1.bias" in text
    assert "no gradient to 2 of 8 parameters on ranks 1-2: layers.3.weight, layers.3.bias" in text
    assert "find_unused_parameters=True" in text
    for other, gradients in results:
        assert other == text
        assert_same_bits(gradients, results[0][1])


@pytest.mark.parametrize("mode", ["find_unused_parameters", "static_graph"])
def test_parameters_unused_on_all_ranks_are_not_sent(mode):
    def body():
        model = DistributedDataParallel(Branches(), skip_all_reduce_unused_params=True, **{mode: True})
        sent = []
        for which in ([0, 3], [0, 3], [0, 2]):
            if which == [0, 2] and mode == "static_graph":
                break
            before = dist.stats().bytes
            loss_of(model(torch.ones(1, 4), which)).backward()
            sent.append(dist.stats().bytes - before)
        return sent

    large = 4 * 300_000 * 4
    for sent in run_ranks(2, body):
        assert max(sent[:2]) < 1000
        assert sent[2:] == [] or sent[2] > large


def test_error_reports_parameters_frozen_after_wrapping():
    def body():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model.module[0].requires_grad_(False)
        with pytest.raises(dist.UsageError, match=r"0\.weight \(frozen after wrapping\), 0\.bias"):
            model(torch.ones(1, 2)).sum().backward()
        found = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), find_unused_parameters=True)
        found.module[0].requires_grad_(False)
        found(torch.ones(1, 2)).sum().backward()
        return [g is None for g in state(found)[0]]

    assert run_ranks(2, body) == [[True, True, False, False]] * 2


class Repeats(nn.Module):
    """A model with a layer in three re-entrant checkpoints, an unused layer, and a parameter of the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=True)
        return {"x": [x]}


def repeats_loss(model, x):
    inner = getattr(model, "module", model)
    return (model(x)["x"][0] * inner.own).sum()


class Hidden:
    """A plain object with a reference to itself. It is neither a mapping nor a type that torch traverses."""

    def __init__(self, tensor):
        self.inside, self.me, self.count = [{"x": tensor}], self, 3


class Slots:
    """An object with slots, which the search for outputs does not traverse."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


class Checkpoints(nn.Module):
    def __init__(self, out, count):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.out = out

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, torch.tanh(x), use_reentrant=True)
        return self.out(x)


@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_outputs_in_plain_objects_are_found(mode):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Checkpoints(Hidden, 2), **mode)
        model(torch.ones(1, 4) * (rank + 1)).inside[0]["x"].sum().backward()
        return state(model)[0]

    oracle = Checkpoints(Hidden, 2)
    for rank in range(2):
        (oracle(torch.ones(1, 4) * (rank + 1)).inside[0]["x"].sum() / 2).backward()
    for result in run_ranks(2, body):
        assert_equal(result, [p.grad for p in oracle.parameters()])


@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("finds", [True, False])
def test_gradient_after_the_reduction_is_an_error(mode, finds, monkeypatch):
    def body():
        if not finds:  # deeply nested backwards run in separate threads, which cannot see the outer backward
            monkeypatch.setattr("allranks.parallel.reducer._is_nested", lambda: False)
        model = DistributedDataParallel(Checkpoints(Slots, 1), **mode)
        x = torch.ones(1, 4)
        loss = model(x).tensor.sum()
        with pytest.raises(dist.UsageError) as caught:
            loss.backward()
        # A gradient outside a forward belongs to the caller. It is not reduced.
        sum(p.square().sum() for p in model.parameters()).backward()
        return str(caught.value)

    for text in run_ranks(2, body):
        if finds or mode:
            assert re.search(r"(first\.|layers\.0\.)\w+ got its gradient in a backward within a backward", text)
            assert "plain objects" in text
        else:
            assert "no gradient to 2 of 4 parameters" in text


@pytest.mark.parametrize("as_view", [False, True])
def test_static_graph_equals_torch(tmp_path, as_view):
    def train(model):
        x = (torch.linspace(-1, 1, 8).view(2, 4) * (dist.get_rank() + 1)).requires_grad_()
        seen = []
        for _ in range(3):
            model.zero_grad()
            repeats_loss(model, x).backward()
            seen.append(state(model))
        return seen

    def body(file):
        mine = []
        for overlap in (False, True):
            model = DistributedDataParallel(Repeats(), static_graph=True, gradient_as_bucket_view=as_view)
            model._reducer.overlap = overlap
            mine.append(train(model))
        late = DistributedDataParallel(Repeats(), gradient_as_bucket_view=as_view)
        late._set_static_graph()
        mine.append(train(late))
        with torchs_world(file) as torchs:
            return mine, train(torchs(Repeats(), static_graph=True, gradient_as_bucket_view=as_view))

    for mine, reference in run_ranks(2, body, str(tmp_path / "meet")):
        for way in mine:
            assert_equal(way, reference)
        assert [g is None for g in mine[0][0][0]] == [False] * 3 + [True] * 2


def test_changed_static_graph_is_an_error_on_every_rank():
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(Branches(), static_graph=True)
        x = torch.ones(1, 4)
        loss_of(model(x, [0, 1] if rank else [1])).backward()  # layer 0 on rank 1 only, layers 2 and 3 on no rank
        texts = []
        for which in ([[0], [0, 1]], [[1], [0, 1, 3]], [[1], [1]]):
            with pytest.raises(dist.UsageError) as caught:
                loss_of(model(x, which[rank])).backward()
            texts.append(str(caught.value))
        model.zero_grad()
        loss_of(model(x, [0, 1] if rank else [1])).backward()
        late = DistributedDataParallel(nn.Linear(1, 1))
        late(torch.ones(1, 1)).sum().backward()
        with pytest.raises(RuntimeError, match="before training loop starts"):
            late._set_static_graph()
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
        return texts, state(model)[0]

    (texts, gradients), (others, same) = run_ranks(2, body)
    assert texts == others
    assert_same_bits(gradients, same)
    assert "1 gradients instead of 0 to 2 of 8 parameters on rank 0: layers.0.weight, layers.0.bias" in texts[0]
    assert "no gradient to 2 of 8 parameters on rank 0: layers.1.weight" in texts[0]
    assert "1 gradients instead of 0 to 2 of 8 parameters on rank 1: layers.3.weight" in texts[1]
    assert "no gradient to 2 of 8 parameters on rank 1: layers.0.weight" in texts[2]
    assert all(re.search("Omit static_graph=True if backwards differ", t) for t in texts)


def test_reentrant_checkpoints_with_shared_layers_need_a_static_graph():
    def body():
        model = Repeats()
        del model.unused
        model = DistributedDataParallel(model)
        with pytest.raises(dist.UsageError, match=r"(?s)3 gradients instead of 1 .*shared\.weight.*use_reentrant"):
            repeats_loss(model, torch.ones(1, 4, requires_grad=True)).backward()

    run_ranks(2, body)


def test_interrupted_backward_does_not_affect_the_next_backward():
    """Interrupt a backward, and check that its pending reductions and counts do not affect the next backward."""

    def body():
        rank = dist.get_rank()
        ends = []
        for kwargs in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model = DistributedDataParallel(Branches(), **kwargs)
            loss = loss_of(model(torch.ones(1, 4) * (rank + 1), [0, 1, 2, 3]))
            broken = model.module.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
            late = loss_of(model(torch.ones(1, 4) * (rank + 1), [0, 1, 2, 3]))
            with pytest.raises(ZeroDivisionError):
                late.backward(retain_graph=True)
            broken.remove()
            model.zero_grad()
            loss.backward()
            ends.append(state(model)[0])
        return ends

    zero, one = run_ranks(2, body)
    for a, b in zip(zero, one, strict=True):
        assert_same_bits(a, b)
        assert all(g is not None for g in a)
