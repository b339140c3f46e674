"""Bitwise comparison of the training of common models on a worker and on the local CPU.

After five steps the tests compare losses, parameters, buffers, gradients and optimizer states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import adam

import allranks

pytestmark = pytest.mark.usefixtures("mw")

STEPS = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order on the worker and locally."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Tagger(nn.Module):
    """A recurrent network over words."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.recurrent = kind(8, 12, num_layers=2, batch_first=True, dropout=0.25, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def forward(self, words: Tensor) -> Tensor:
        found, _ = self.recurrent(self.words(words))
        return self.head(found[:, -1])


class Encoder(nn.Module):
    """A TransformerEncoder over words, some of which are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        found = self.encoder(self.words(words), src_key_padding_mask=words.eq(0))
        return self.head(found.mean(1))


class Block(nn.Module):
    """Causal attention by `scaled_dot_product_attention`, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        many, length, width = x.shape
        q, k, v = (
            each.view(many, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.mix(self.before(x)).split(width, 2)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(many, length, width))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A language model that shares its embedding with its head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(Block(16, 4), Block(16, 4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.norm(self.blocks(x)))


class MaskedAttention(nn.Module):
    """Attention from basic operations: softmax, matrix products, and a triangular mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.register_buffer("later", torch.ones(6, 6, dtype=torch.bool).triu(1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bqc,bkc->bqk", self.query(x), self.key(x)) / math.sqrt(8)
        weights = scores.masked_fill(self.later, -math.inf).softmax(-1)
        return self.head(torch.bmm(weights, self.value(x))[:, -1])


class Bag(nn.Module):
    """Texts of different lengths as bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        flat = words.reshape(-1)
        begins = torch.tensor([0, 5, 9, 20], device=words.device)
        return self.head(self.words(flat, begins))


class Vae(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 2 * 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(self.decoder(drawn), x.sigmoid()) + divergence


class Unet(nn.Module):
    """A denoising U-Net: downsampling, upsampling, a shortcut between them, and a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(0, 100, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        kept = torch.linspace(0.99, 0.01, 100, device=x.device)[time].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        rates = torch.exp(torch.arange(4, device=x.device) * -math.log(10000) / 4)
        angles = time[:, None] * rates[None]
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        enter = F.silu(self.enter(noisy))
        low = F.silu(self.norm(self.down(enter))) + embedded[:, :, None, None]
        low = F.interpolate(self.middle(low), scale_factor=2.0, mode="nearest")
        high = self.up(F.avg_pool2d(low, 2))
        return F.mse_loss(self.leave(torch.cat([enter, high], 1)), noise)


class Siamese(nn.Module):
    """One network that processes both elements of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 8), nn.PReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.normalize(self.tower(x[::2]), dim=1), F.normalize(self.tower(x[1::2]), dim=1)
        logits = left @ right.t() / 0.1
        goal = torch.arange(len(left), device=x.device)
        return F.cross_entropy(logits, goal) + F.triplet_margin_loss(left, right, right.roll(1, 0))


class Mixer(nn.Module):
    """An MLP-Mixer layer on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.across, self.within = nn.Linear(4, 4), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + F.gelu(self.across(self.norm(x).transpose(1, 2))).transpose(1, 2)
        return self.head((x + F.gelu(self.within(self.norm(x)))).mean(1))


class Graph(nn.Module):
    """Graph convolutions over a list of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        begins = torch.tensor([0, 1, 2, 3, 3, 0], device=x.device)
        ends = torch.tensor([1, 2, 3, 0, 1, 2], device=x.device)
        degree = torch.zeros(len(x), device=x.device).index_add_(0, ends, torch.ones(6, device=x.device)).clamp(min=1)
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.zeros_like(x).scatter_add(0, ends[:, None].expand(-1, x.shape[1]), x[begins]) / degree[:, None]
            x = F.elu(x)
        return x


class Wide(nn.Module):
    """Layers that no other model of this file has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(12, 8))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.both = nn.Bilinear(8, 8, 4)
        self.gates = nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.first(x))
        x = self.both(x, F.softplus(self.second(x)))
        state = torch.zeros(len(x), 4, device=x.device)
        for _ in range(3):
            state = self.gates(F.alpha_dropout(x, 0.1, self.training), state)
        return self.head(F.instance_norm(state[:, None])[:, 0])


class Case(NamedTuple):
    """A model, its input (the shape of floats, or of words if `words` is not 0), and its loss."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: F.cross_entropy(
        model(x), torch.arange(len(x), device=x.device) % 5
    )


def itself(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, 5)
        ),
        (4, 12),
    ),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.25),
            nn.Flatten(),
            nn.Linear(36, 5),
            nn.LogSoftmax(1),
        ),
        (4, 1, 8, 8),
        0,
        lambda model, x: F.nll_loss(model(x), torch.arange(4, device=x.device)),
    ),
    "resnet": Case(
        lambda: nn.Sequential(
            Residual(1, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        ),
        (4, 1, 8, 8),
    ),
    "lstm": Case(lambda: Tagger(nn.LSTM), (4, 6), 20),
    "gru": Case(lambda: Tagger(nn.GRU), (4, 6), 20),
    "encoder": Case(Encoder, (4, 6), 20),
    "gpt": Case(
        Gpt,
        (4, 10),
        24,
        lambda model, x: F.cross_entropy(model(x[:, :-1]).reshape(-1, 24), x[:, 1:].reshape(-1), label_smoothing=0.1),
    ),
    "attention": Case(
        MaskedAttention,
        (4, 6, 8),
        0,
        lambda model, x: F.multi_margin_loss(model(x), torch.arange(4, device=x.device) % 3),
    ),
    "autoencoder": Case(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1), nn.ReLU6(), nn.ConvTranspose1d(4, 2, 4, 2, 1), nn.Sigmoid()),
        (4, 2, 8),
        0,
        lambda model, x: F.smooth_l1_loss(model(x), x),
    ),
    "bag": Case(Bag, (4, 6), 20),
    "vae": Case(Vae, (4, 12), 0, itself),
    "unet": Case(Unet, (4, 1, 8, 8), 0, itself),
    "siamese": Case(Siamese, (8, 12), 0, itself),
    "mixer": Case(Mixer, (4, 1, 8, 8)),
    "graph": Case(Graph, (4, 12)),
    "wide": Case(Wide, (4, 12)),
}

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "adam capturable": lambda p: torch.optim.Adam(p, 1e-2, capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


def batches(case: Case) -> list[Tensor]:
    torch.manual_seed(7)
    if case.words:
        return [torch.randint(0, case.words, case.shape) for _ in range(STEPS)]
    return [torch.randn(case.shape) for _ in range(STEPS)]


def here(found: Any) -> Any:
    """Return `found` with every tensor copied to the CPU."""
    if isinstance(found, Tensor):
        return found.detach().cpu().clone()
    if isinstance(found, dict):
        return {name: here(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [here(each) for each in found]
    return found


def same(found: Any, right: Any, where: str = "") -> None:
    """Assert that two results have equal values, types and dtypes."""
    assert type(found) is type(right), where
    if isinstance(right, Tensor):
        assert (found.dtype, found.shape) == (right.dtype, right.shape), where
        assert torch.equal(found.nan_to_num(7e7), right.nan_to_num(7e7)), f"{where}: {found}, expected {right}"
    elif isinstance(right, dict):
        assert list(found) == list(right), where
        for name in right:
            same(found[name], right[name], f"{where}/{name}")
    elif isinstance(right, list):
        assert len(found) == len(right), where
        for at, (mine, its) in enumerate(zip(found, right, strict=True)):
            same(mine, its, f"{where}/{at}")
    else:
        assert found == right, where


def train(model: nn.Module, optimiser: torch.optim.Optimizer, case: Case, device: str) -> dict[str, Any]:
    """Train for five steps and evaluate; return the losses and the complete state."""
    fed = [each.to(device) for each in batches(case)]
    torch.manual_seed(1)
    losses: list[Tensor] = []

    def closure(x: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = case.loss(model, x)
        loss.backward()
        losses.append(loss)
        return loss

    for x in fed:
        optimiser.step(partial(closure, x))
    model.eval()
    with torch.no_grad():
        losses.append(case.loss(model, fed[0]))
    return here({
        "losses": losses,
        "state": dict(model.state_dict()),
        "gradients": {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
        "optimiser": optimiser.state_dict(),
    })  # fmt: skip


def usual(case: Case) -> Callable[[Any], torch.optim.Optimizer]:
    names = ["sgd", "adam", "adamw fused", "adam fused", "rmsprop"]
    return OPTIMISERS[names[list(CASES.values()).index(case) % len(names)]]


@pytest.mark.parametrize("name", CASES)
def test_model_moved_to_a_worker_trains_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    local = case.make()
    moved = copy.deepcopy(local).to("worker:1")
    assert {str(each.device) for each in moved.parameters()} == {"worker:1"}
    right = train(local, usual(case)(local.parameters()), case, "cpu")
    found = train(moved, usual(case)(moved.parameters()), case, "worker:1")
    same(found, right)


@pytest.mark.parametrize("name", CASES)
def test_model_created_on_a_worker_trains_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    local = case.make()
    torch.manual_seed(0)
    with torch.device("worker:1"):
        made = case.make()
    same(here(dict(made.state_dict())), here(dict(local.state_dict())))
    right = train(local, usual(case)(local.parameters()), case, "cpu")
    same(train(made, usual(case)(made.parameters()), case, "worker:1"), right)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimizer_trains_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)),
        (4, 12), 0, lambda model, x: F.cross_entropy(model(x), torch.arange(4, device=x.device)),
    )  # fmt: skip
    torch.manual_seed(0)
    local = case.make()
    moved = copy.deepcopy(local).to("worker:1")
    if name == "adam capturable":  # torch implements this for CPUs but refuses it
        known = adam._get_capturable_supported_devices()
        monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_: [*known, "cpu"])
    right = train(local, OPTIMISERS[name](local.parameters()), case, "cpu")
    same(train(moved, OPTIMISERS[name](moved.parameters()), case, "worker:1"), right)


@pytest.mark.parametrize("name", ["lstm", "gpt", "vae", "cnn"])
def test_captured_step_trains_as_on_the_cpu(name: str) -> None:
    case = CASES[name]

    def run(model: nn.Module, device: str, wrap: Callable[[Any], Any]) -> Any:
        optimiser = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

        def step(x: Tensor) -> Tensor:
            loss = case.loss(model, x)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            return loss.detach()

        fed, taken = [each.to(device) for each in batches(case)], wrap(step)
        torch.manual_seed(1)
        return here([[taken(x) for x in fed], dict(model.state_dict())])

    torch.manual_seed(0)
    local = case.make()
    moved = copy.deepcopy(local).to("worker:1")
    same(run(moved, "worker:1", allranks.capture), run(local, "cpu", lambda step: step))


def test_gan_with_two_optimizers_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    ]
    moved = [copy.deepcopy(each).to("worker:1") for each in nets]

    def play(maker: nn.Module, judge: nn.Module, device: str) -> Any:
        torch.manual_seed(3)
        left = torch.optim.Adam(maker.parameters(), 1e-2, betas=(0.5, 0.999))
        right = torch.optim.Adam(judge.parameters(), 1e-2, betas=(0.5, 0.999))
        yes, no = torch.ones(4, 1, device=device), torch.zeros(4, 1, device=device)
        losses = []
        for _ in range(STEPS):
            true, made = torch.randn(4, 6, device=device), maker(torch.randn(4, 4, device=device))
            right.zero_grad()
            loss = F.binary_cross_entropy_with_logits(judge(true), yes)
            loss = loss + F.binary_cross_entropy_with_logits(judge(made.detach()), no)
            loss.backward()
            right.step()
            left.zero_grad()
            fooled = F.binary_cross_entropy_with_logits(judge(made), yes)
            fooled.backward()
            left.step()
            losses += [loss, fooled]
        return here([losses, dict(maker.state_dict()), dict(judge.state_dict()), left.state_dict(), right.state_dict()])

    same(play(*moved, "worker:1"), play(*nets, "cpu"))


def test_moving_to_a_worker_and_back_keeps_parameters_and_ties() -> None:
    model = Gpt()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    before = list(model.parameters())
    before[0].note = "mine"
    model.to("worker:1")
    assert model.head.weight is model.words.weight is before[0]
    assert before[0].note == "mine"
    assert all(mine is its for mine, its in zip(model.parameters(), before, strict=True))
    assert all(isinstance(each, nn.Parameter) and each.device.type == "worker" for each in before)
    x = torch.arange(10, device="worker:1")[None]
    start = before[0].detach().cpu()
    model(x).sum().backward()
    optimiser.step()
    gradient = before[0].grad.cpu()
    model.half().float().to("cpu")
    assert type(before[0]) is nn.Parameter
    assert before[0].device.type == "cpu"
    assert before[0].note == "mine"
    assert model.head.weight is before[0]
    assert before[0].grad is not None
    assert torch.equal(before[0].grad, gradient.half().float())
    assert torch.equal(before[0], (start - 0.1 * gradient).half().float())


def test_hooks_move_with_parameters() -> None:
    model, said = nn.Linear(3, 2), []
    model.weight.register_hook(lambda gradient: said.append(str(gradient.device)))
    model.weight.register_post_accumulate_grad_hook(lambda weight: said.append(weight is model.weight))
    for device in ("cpu", "worker:1", "worker:2", "cpu"):
        model.to(device)
        loss = model(torch.ones(2, 3, device=device)).sum()  # a graph whose backward has run does not prevent the move
        loss.backward()
        assert said == [device, True]
        said.clear()


class _Scaled(nn.Module):
    """Two layers that share a weight, and a parameter that no graph uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_module_moves_although_a_graph_uses_its_parameters() -> None:
    """Move a module whose parameters an existing graph uses, as is possible with a GPU.

    The existing graph and optimizer must raise an error, because they would train stale copies.
    """
    model = _Scaled()
    before = torch.optim.SGD(model.parameters(), 0.5)
    expected = model(torch.ones(2, 3)).detach()
    loss, left, scale = model(torch.ones(2, 3)).square().sum(), model.first.weight, model.scale
    hooked: list[str] = []
    left.register_hook(lambda grad: hooked.append(str(grad.device)))
    model.to("worker:1")
    assert {str(each.device) for each in model.parameters()} == {"worker:1"}
    assert model.second.weight is model.first.weight
    assert model.scale is scale
    assert torch.allclose(model(torch.ones(2, 3, device="worker:1")).cpu(), expected)
    with pytest.raises(RuntimeError, match=r"moved from cpu to worker:1 since this graph|poisoned"):
        loss.backward()
    with pytest.raises(RuntimeError, match="SGD has a parameter that stayed on cpu when its module moved to worker:1"):
        before.step()
    assert hooked == []
    model(torch.ones(2, 3, device="worker:1")).sum().backward()
    assert hooked == ["worker:1"]
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert not torch.allclose(model(torch.ones(2, 3, device="worker:1")).cpu(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)).eval(),
        lambda: torch.export.export(nn.Linear(3, 4), (torch.ones(2, 3),)).module(),
    ],
    ids=["weight_norm", "spectral_norm", "exported"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_modules_that_hold_their_own_parameters_move(make: Any) -> None:
    model = make()
    expected = model(torch.ones(2, 3))
    model.to("worker:1")
    assert {str(each.device) for each in model.parameters()} == {"worker:1"}
    assert torch.allclose(model(torch.ones(2, 3, device="worker:1")).cpu(), expected, atol=1e-6)
    for name, each in model.named_parameters():
        assert dict(model.named_parameters())[name] is each


def test_lazy_modules_move_before_they_have_shapes() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)).to("worker:1")
    torch.manual_seed(3)
    found = model(torch.ones(2, 3, 5, 5, device="worker:1"))
    assert {str(each.device) for each in model.parameters()} == {"worker:1"}
    assert [type(each).__name__ for each in model] == ["Conv2d", "BatchNorm2d", "Flatten", "Linear"]
    found.sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    local = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    torch.manual_seed(3)
    assert torch.allclose(local(torch.ones(2, 3, 5, 5)), found.cpu(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_module_that_cannot_move_stays_entirely_on_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="Sequential cannot move to a worker: TorchScript"):
        model.to("worker:1")
    assert {str(each.device) for each in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_are_clipped_with_and_without_foreach(foreach: bool | None) -> None:
    def clipped(device: str) -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Linear(3, 3).to(device)
        model(torch.ones(1, 3, device=device)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach).item()
        nn.utils.clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
        return norm, [each.grad.cpu() for each in model.parameters() if each.grad is not None]

    (expected, locals_), (norm, found) = clipped("cpu"), clipped("worker:1")
    assert norm == pytest.approx(expected)
    assert all(torch.allclose(here, there) for here, there in zip(locals_, found, strict=True))


@pytest.mark.parametrize("where", ["cpu", "worker:1"])
def test_ctc_loss_of_one_sequence_equals_the_loss_on_the_cpu(where: str) -> None:
    log_probs, targets = torch.randn(5, 4).log_softmax(-1), torch.tensor([1, 2])
    lengths = torch.tensor(5), torch.tensor(2)
    expected = nn.functional.ctc_loss(log_probs, targets, *lengths)
    there = log_probs.to("worker:1").requires_grad_()
    found = nn.functional.ctc_loss(there, targets.to("worker:1"), *(each.to(where) for each in lengths))
    assert torch.allclose(found.cpu(), expected)
    found.backward()
    assert there.grad is not None
