"""`DataParallel` on two workers, compared with a batch that the test splits and processes locally."""

from __future__ import annotations

import copy
import sys
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allranks
from allranks.nn import parallel
from allranks.remote.master import start
from allranks.remote.master.master import Master
from allranks.remote.torch_device.tensor import RemoteTensor

pytestmark = pytest.mark.usefixtures("as_many_threads")

BOTH = ["worker:1", "worker:2"]
Pair = namedtuple("Pair", "left right")


class Tied(nn.Module):
    """A module that is used twice, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = self.inner
        self.out = nn.Linear(6, 6)
        self.out.weight = self.inner[0].weight
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.inner(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Nested(nn.Module):
    """A module that receives and returns tensors in different kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, -2.0]))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, given: dict[str, Any], factor: float, *, extra: list[Tensor]) -> dict[str, Any]:
        pair = given["pair"]
        return {
            "pair": Pair(pair.left * self.scale, pair.right + extra[0]),
            "list": [extra[0] * factor, (given["x"].sin(),)],
            "nothing": None,
        }


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "perceptron": (perceptron, (6,)),
    "convolution": (convolution, (2, 5, 5)),
    "tied": (Tied, (6,)),
    "recurrent": (Recurrent, (4, 6)),
}


def by_hand(module: nn.Module, parts: list[Tensor]) -> tuple[Tensor, list[Tensor], nn.Module]:
    """Process each part with a copy of the module; return the outputs, the summed gradients and the first copy."""
    copies = [copy.deepcopy(module) for _ in parts]
    output = torch.cat([each(part) for each, part in zip(copies, parts, strict=True)])
    output.square().sum().backward()
    grads = [sum(each[1:], each[0]) for each in zip(*[[p.grad for p in c.parameters()] for c in copies], strict=True)]
    return output, grads, copies[0]


@pytest.mark.parametrize("batch", [6, 7, 1])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_match_a_manually_split_batch(mw: Master, name: str, batch: int) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(batch)
    module, x = make(), torch.randn(batch, *shape)
    output, grads, first = by_hand(module, [*x.chunk(2)])
    wrapped = allranks.DataParallel(module.to("worker:1"), BOTH)
    # On some CPUs, MKL's rounding depends on the alignment of its operands. oneDNN computes the local LSTM.
    error = 1e-5
    for given in (x, x.to("worker:2")):
        wrapped.zero_grad()
        ours = wrapped(given)
        assert str(ours.device) == "worker:1"
        assert torch.allclose(ours.cpu(), output, rtol=0, atol=error)
        ours.square().sum().backward()
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            assert str(parameter.grad.device) == "worker:1"
            assert torch.allclose(parameter.grad.cpu(), grad, rtol=0, atol=error)
        if given is x:
            # As in torch, the first replica updates the buffers of the module.
            for buffer, theirs in zip(module.buffers(), first.buffers(), strict=True):
                assert torch.equal(buffer.cpu(), theirs)


def test_training(mw: Master) -> None:
    torch.manual_seed(0)
    module, x = perceptron(), torch.randn(3, 10, 6)
    local = copy.deepcopy(module)
    wrapped = allranks.DataParallel(module.to("worker:1"), BOTH)
    optimizers = [torch.optim.AdamW(each.parameters(), fused=True) for each in (wrapped, local)]
    for batch in x:
        wrapped(batch).square().sum().backward()
        _, grads, _ = by_hand(local, [part.clone() for part in batch.chunk(2)])
        for parameter, grad in zip(local.parameters(), grads, strict=True):
            parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(module.parameters(), local.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_captured_step_has_the_losses_of_the_plain_step(mw: Master) -> None:
    torch.manual_seed(0)
    modules = [module := perceptron(), copy.deepcopy(module)]
    x, losses = torch.randn(5, 10, 6, device="worker:1"), []
    for module, how in zip(modules, (allranks.capture, lambda step: step), strict=True):
        wrapped = allranks.DataParallel(module.to("worker:1"), BOTH)
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)

        def step(x: Tensor, wrapped: Any = wrapped, optimizer: Any = optimizer) -> Tensor:
            loss = wrapped(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = how(step)
        losses.append([call(batch).item() for batch in x])
    assert losses[0] == losses[1]


def test_tensors_in_containers_are_scattered_and_gathered(mw: Master) -> None:
    module = Nested().to("worker:1")
    wrapped = allranks.nn.parallel.DataParallel(module, BOTH)
    x, left, right, extra = (torch.randn(5, 2, requires_grad=True) for _ in range(4))
    out = wrapped({"pair": Pair(left, right), "x": x}, 3.0, extra=[extra])
    assert type(out["pair"]) is Pair
    assert out["nothing"] is None
    assert torch.equal(out["pair"].left.cpu(), left * torch.tensor([1.5, -2.0]))
    assert torch.equal(out["pair"].right.cpu(), right + extra)
    assert torch.equal(out["list"][0].cpu(), extra * 3)
    assert torch.equal(out["list"][1][0].cpu(), x.sin())
    (out["pair"].left.sum() + out["list"][1][0].sum()).backward()
    # Gradients pass through the split to the inputs. A parameter that no part uses has no gradient.
    assert torch.equal(x.grad, x.cos())
    assert torch.allclose(module.scale.grad.cpu(), left.sum(0))
    assert module.unused.grad is None
    with pytest.raises(ValueError, match="same number of keys"):
        parallel.gather([{"a": x.to("worker:1")}, {}], "worker:1")


def test_dim_and_output_device_select_split_and_destination(mw: Master) -> None:
    module, x = nn.Linear(6, 3), torch.randn(2, 5, 6)
    expected = module(x)
    module.to("worker:1")
    for where in ("worker:2", "cpu"):
        out = allranks.DataParallel(module, BOTH, output_device=where, dim=1)(x)
        assert str(out.device) == where
        assert torch.allclose(out.cpu(), expected, atol=1e-6)
    out = parallel.data_parallel(module, x, BOTH)
    assert torch.allclose(out.cpu(), expected, atol=1e-6)


def test_scalar_outputs_are_gathered_into_a_vector(mw: Master) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    x = torch.arange(6.0, requires_grad=True)
    wrapped = allranks.DataParallel(Loss(), BOTH)  # also tests a module without parameters
    with pytest.warns(UserWarning, match="unsqueeze and return a vector"):
        loss = wrapped(x)
    assert loss.tolist() == [3, 12]
    loss.mean().backward()
    assert torch.equal(x.grad, torch.full((6,), 0.5))


def test_replicas_behave_as_in_torch(mw: Master) -> None:
    seen: list[tuple[str, str, str, int, bool]] = []

    class Counting(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            made = torch.zeros(1, device="worker")
            seen.append((str(self.weight.device), str(x.device), str(made.device), self.count, self.training))
            return super().forward(x)

    module = Counting(3, 3, device="worker:1")
    hooked: list[str] = []
    module.register_forward_hook(lambda module, given, result: hooked.append(str(result.device)))
    wrapped = allranks.DataParallel(module, BOTH)
    with torch.no_grad():
        out = wrapped(torch.randn(4, 3))
    assert not out.requires_grad
    wrapped.eval()
    wrapped(torch.randn(4, 3))
    assert seen == [(each, each, each, 1, training) for training in (True, False) for each in BOTH]
    assert hooked == BOTH * 2
    assert module.count == 0
    first, second = parallel.replicate(module, BOTH)
    assert [*first.parameters()] == [*second.parameters()] == []
    assert second._former_parameters["weight"] is second.weight
    with torch.no_grad():
        first.weight.zero_()
    assert module.weight.cpu().count_nonzero() == 0
    assert second.weight.cpu().count_nonzero() > 0


def test_second_derivatives_match_the_local_module(mw: Master) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(6, 4)

    def penalty(call: Any, x: Tensor, parameters: list[nn.Parameter]) -> Tensor:
        x = x.detach().requires_grad_()
        inputs = torch.autograd.grad(call(x).sum(), [x, *parameters], create_graph=True)
        total = sum((each.square().sum() for each in inputs[1:]), inputs[0].square().sum())
        total.backward()
        return total

    local = copy.deepcopy(module)
    penalty(local, x, [*local.parameters()])
    module.to("worker:1")
    penalty(allranks.DataParallel(module, BOTH), x.to("worker:1"), [*module.parameters()])
    *weights, bias = zip(module.parameters(), local.parameters(), strict=True)
    for ours, theirs in weights:
        assert torch.allclose(ours.grad.cpu(), theirs.grad, atol=1e-5)
    assert [each.grad for each in bias] == [None, None]  # no derivative depends on the bias


def test_wrapper_can_be_saved_loaded_and_copied(mw: Master) -> None:
    module = perceptron().to("worker:1")
    wrapped = allranks.DataParallel(module, BOTH)
    state = wrapped.state_dict()
    assert [*state] == ["module." + name for name in module.state_dict()]
    another = copy.deepcopy(wrapped)
    assert isinstance(another, nn.DataParallel)
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.zero_()
    x = torch.randn(4, 6)
    assert not torch.equal(another(x).cpu(), wrapped(x).cpu())
    another.load_state_dict(state)
    assert torch.equal(another(x).cpu(), wrapped(x).cpu())


def test_replicate_sends_all_parameters_with_one_send_and_recv(mw: Master) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(25))).to("worker:1")
    parallel.replicate(module, BOTH)
    before = mw.connections.outbox.calls
    replicas = parallel.replicate(module, BOTH)
    assert mw.connections.outbox.calls - before == 2  # a send and a recv
    loss = replicas[0](x := torch.ones(1, 4, device="worker:1")) + replicas[1](x.to("worker:2")).to("worker:1")
    loss.sum().backward()
    assert all(isinstance(each.grad, RemoteTensor) for each in module.parameters())


def test_device_ids_are_validated_and_place_the_module(mw: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    assert [*map(str, allranks.DataParallel(module).device_ids)] == BOTH
    assert [*map(str, parallel.DataParallel(module, [2, torch.device("worker:1")]).device_ids)] == BOTH[::-1]
    with pytest.raises(
        RuntimeError, match=r"on device worker:1 \(device_ids\[0\]\) but found one of them on device: cpu"
    ):
        allranks.DataParallel(module)(torch.ones(2, 2))
    with pytest.raises(allranks.UsageError, match="worker:9 does not exist"):
        allranks.DataParallel(module, ["worker:1", "worker:9"])
    with pytest.raises(allranks.UsageError, match="either workers or devices of this process, not both"):
        allranks.DataParallel(module, ["worker:1", "cuda:0"])
    with pytest.raises(allranks.UsageError, match="expected workers, not a group"):
        allranks.DataParallel(module, [str(mw.group([1, 2]).device)])

    alone = allranks.DataParallel(module, ["cpu"])
    assert alone.module is module
    assert torch.equal(alone(torch.ones(2, 2)), module(torch.ones(2, 2)))
    assert str(module.weight.device) == "cpu"
    one = allranks.DataParallel(module, ["worker:2"])
    assert str(module.weight.device) == "worker:2"
    assert str(one(torch.ones(2, 2)).device) == "worker:2"

    monkeypatch.setattr(start, "_master", None)
    with pytest.raises(allranks.NotInitializedError, match="init_master_worker"):
        allranks.DataParallel(module, ["worker:1"])


def test_module_without_inputs_is_called(mw: Master) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.value * 2

    out = allranks.DataParallel(Constant().to("worker:1"), BOTH)()
    assert out.tolist() == [2, 2]


def test_devices_that_are_not_workers_are_passed_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_master", None)
    torchs = sys.modules["torch.nn.parallel.data_parallel"]  # as an attribute, this name is the function
    monkeypatch.setattr(torchs, "_get_available_device_type", lambda: None)
    module = nn.Linear(2, 2)
    for given in (None, [0, 1], ["cpu"]):
        wrapped = allranks.DataParallel(module, given)
        assert wrapped.device_ids == []
        assert torch.equal(wrapped(x := torch.ones(3, 2)), module(x))
