"""Changes, between calls, of Python values that a captured step reads.

After a change, the captured step must behave as the plain step. The reference is the same program without capture, on
the local CPU. ALLRANKS_TEST_SEED=n runs the random changes with seed n only; ALLRANKS_TEST_SEEDS=n runs n seeds.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import io
import math
import os
import random
import re
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks import UsageError
from allranks.remote.capture.watch import ReachableValues
from allranks.remote.master.master import Master

SETTINGS: dict[str, Any] = {"bias": 0.5, "nested": {"by": [1.0, (2.0, 3.0)]}}
SCALE = 1.0
ONE = os.environ.get("ALLRANKS_TEST_SEED")
SEEDS = range(int(os.environ.get("ALLRANKS_TEST_SEEDS", "2"))) if ONE is None else [int(ONE)]


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Config:
    scale: float = 1.0
    powers: list[int] = field(default_factory=lambda: [1, 2])


class Options:
    smoothing = 0.0


class Slotted:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.by


class Net(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.second = nn.Linear(16, 4)
        self.factor = 1.0
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.act(self.norm(self.first(x))))) * self.factor * self.gain


def offset(by: float = 0.0, *, more: float = 0.0) -> float:
    return by + more


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Named:
    def __init__(self) -> None:
        self.weight0, self.weight1, self.plain, self.hidden, self.others = 1.0, 2.0, 3.0, 4.0, 5.0

    def total(self) -> float:
        found = sum(getattr(self, f"weight{each}") for each in range(2)) + getattr(self, "plain")  # noqa: B009
        return found + sum(getattr(self, each) for each in ("hidden",)) + self.__dict__["others"]


class Trainer:
    def __init__(self, device: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = Net().to(device)
        self.optimizer: torch.optim.Optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        }[optimizer](self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.config, self.slotted = Config(), Slotted()
        self.numbers, self.number = np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])
        self.offset: Callable[[], float] = functools.partial(offset, by=0.1)
        self.skipped: set[str] = set()
        self.recent = collections.deque([1.0], maxlen=3)
        self.epoch = 0  # the step does not read it
        self.extra: Any = None
        self.named = Named()
        self.log = io.BytesIO()  # capture cannot detect writes to this object

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.log.write(b".")
        out = scaled(self.net(x)) * self.config.scale * self.slotted.twice + SETTINGS["bias"]
        for power in self.config.powers:
            out = out + out.pow(power) * 0.01 * SETTINGS["nested"]["by"][1][0]
        out = out * self.named.total() / 15
        out = out * float(self.numbers[0]) + self.number[1].item() + self.offset() + sum(self.recent)
        if "square" not in self.skipped:
            out = out + out.square() * 0.01
        loss = F.cross_entropy(out, y, label_smoothing=Options.smoothing)
        if self.extra is not None:
            loss = loss + self.extra(self)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def unread(self) -> int:
        return self.epoch


def batch(number: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    made = torch.randn(12, 8, generator=generator), torch.randint(4, (12,), generator=generator)
    return [each.to(device) for each in made]


def set_group(trainer: Trainer, **values: Any) -> None:
    trainer.optimizer.param_groups[0].update(values)


def assign(name: str, value: Any) -> None:
    globals()[name] = value


def leave_gradients(trainer: Trainer) -> None:
    sum(p.square().sum() for p in trainer.net.parameters()).backward()  # type: ignore[union-attr]


def reload(trainer: Trainer) -> None:
    state = trainer.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.03
    trainer.optimizer.load_state_dict(state)


def double(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def put_tensor(trainer: Trainer) -> None:
    trainer.net.second.bias = nn.Parameter(torch.ones(4, device=trainer.device))


Change = Callable[[Trainer], Any]
CHANGES: dict[str, Change] = {
    "learning rate": lambda t: set_group(t, lr=0.03),
    "learning rate, zero": lambda t: set_group(t, lr=0.0),
    "scheduler": lambda t: t.scheduler.step(),
    "weight decay": lambda t: set_group(t, weight_decay=0.3),
    "momentum": lambda t: set_group(t, momentum=0.0),
    "maximize": lambda t: set_group(t, maximize=True),
    "groups": lambda t: setattr(t.optimizer, "param_groups", [{**t.optimizer.param_groups[0], "lr": 0.07}]),
    "optimizer's state": reload,
    "eval": lambda t: t.net.eval(),
    "eval of one": lambda t: t.net.norm.eval(),
    "an attribute of a module": lambda t: setattr(t.net, "factor", 0.5),
    "an attribute of torch's module": lambda t: setattr(t.net.drop, "p", 0.6),
    "eps": lambda t: setattr(t.net.norm, "eps", 0.1),
    "a class's": lambda t: setattr(Net, "gain", 2.0),
    "hides the class's": lambda t: setattr(t.net, "gain", 2.0),
    "another module": lambda t: setattr(t.net, "act", nn.Tanh()),
    "forward": lambda t: setattr(t.net.act, "forward", torch.tanh),
    "a parameter": put_tensor,
    "a parameter's data": lambda t: setattr(t.net.second.bias, "data", torch.ones(4, device=t.device)),
    "forward hook": lambda t: t.net.first.register_forward_hook(lambda module, args, out: out * 0.5),
    "forward pre-hook": lambda t: t.net.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    "backward hook": lambda t: t.net.second.register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,)),
    "gradient hook": lambda t: t.net.first.weight.register_hook(lambda grad: grad * 0.5),
    "accumulation hook": lambda t: t.net.first.weight.register_post_accumulate_grad_hook(double),
    "optimizer hook": lambda t: t.optimizer.register_step_pre_hook(lambda o, *_: double(t.net.second.bias)),
    "a dataclass": lambda t: setattr(t.config, "scale", 0.5),
    "a list in it": lambda t: t.config.powers.append(3),
    "a number in the list": lambda t: t.config.powers.__setitem__(0, 3),
    "a dict": lambda t: SETTINGS.update(bias=0.7),
    "a new key": lambda t: SETTINGS.update(bias=-0.7, other=1),
    "deep in it": lambda t: SETTINGS["nested"]["by"].__setitem__(1, (0.5, 3.0)),
    "a global of a function that it calls": lambda t: assign("SCALE", 0.5),
    "a class as settings": lambda t: setattr(Options, "smoothing", 0.1),
    "a name that is computed": lambda t: setattr(t.named, "weight1", 0.5),
    "a name in a text": lambda t: setattr(t.named, "plain", 0.5),
    "a name in texts": lambda t: setattr(t.named, "hidden", 0.5),
    "a name in a __dict__": lambda t: setattr(t.named, "others", 0.5),
    "slots": lambda t: setattr(t.slotted, "by", 0.25),
    "an array": lambda t: t.numbers.__setitem__(0, 0.5),
    "a tensor of the master's": lambda t: t.number.fill_(0.5),
    "its data": lambda t: t.number.data.fill_(0.5),
    "a partial": lambda t: setattr(t, "offset", functools.partial(offset, by=0.2)),
    "a partial's keywords": lambda t: t.offset.keywords.update(more=0.5),  # type: ignore[attr-defined]
    "defaults": lambda t: setattr(t, "offset", lambda by=0.75: by),
    "a set": lambda t: t.skipped.add("square"),
    "a deque": lambda t: t.recent.append(0.5),
    "a function": lambda t: setattr(t, "extra", lambda t: t.net.first.weight.abs().sum()),
    "a method": lambda t: setattr(t.net, "forward", types.MethodType(lambda net, x: net.second(net.first(x)), t.net)),
    "gradients that are there": leave_gradients,
    "another type": lambda t: setattr(t.config, "powers", [1.0, 2.5]),
    "frozen": lambda t: setattr(t.net.first.weight, "requires_grad", False),
    "frozen module": lambda t: t.net.first.requires_grad_(False),
    "nothing that it reads": lambda t: setattr(t, "epoch", t.epoch + 1),
}  # fmt: skip

UNREAD = {"nothing that it reads"}
FIRST, EACH = 6, 4  # calls


class Run:
    def __init__(self, device: str, optimizer: str, captured: bool) -> None:
        globals_are_new()
        self.trainer = Trainer(device, optimizer)
        self.call: Any = allranks.capture(self.trainer.step) if captured else self.trainer.step
        torch.manual_seed(1)
        self.losses: list[torch.Tensor] = []

    def train(self, calls: int) -> None:
        for _ in range(calls):
            self.losses.append(self.call(*batch(len(self.losses), self.trainer.device)))

    def found(self) -> list[torch.Tensor]:
        return [each.detach().cpu() for each in (*self.losses, *self.trainer.net.state_dict().values())]


def globals_are_new() -> None:
    assign("SCALE", 1.0)
    SETTINGS.clear()
    SETTINGS.update({"bias": 0.5, "nested": {"by": [1.0, (2.0, 3.0)]}})
    Net.gain, Options.smoothing = 1.0, 0.0


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[bool]:
    return [torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("part", range(4))
def test_change_between_calls_is_noticed_and_recorded_again(mw: Master, part: int) -> None:
    """Check that the next call executes the Python code, and that later calls are replayed again."""
    names, found = list(CHANGES)[part::4], []
    for device, captured in (("cpu", False), ("worker:1", True)):
        run = Run(device, "sgd", captured)
        run.train(FIRST)
        for name in names:
            CHANGES[name](run.trainer)
            ran = [run.trainer.log.tell()]
            for _ in range(EACH):
                run.train(1)
                ran.append(run.trainer.log.tell())
            if captured and name in UNREAD:
                assert ran[0] == ran[-1], name
            elif captured:
                assert ran[0] < ran[1], f"{name} was not detected"
                assert ran[-2] == ran[-1], f"{name} was not recorded"
        found.append(run.found())
    assert all(same(*found)), names[(same(*found).index(False) - FIRST) // EACH :]
    assert found[0][-1].isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_changes_give_the_results_of_the_plain_step(mw: Master, seed: int) -> None:
    kind = random.Random(seed).choice(["sgd", "adamw", "adam"])
    found = []
    for device, captured in (("cpu", False), ("worker:1", True)):
        choice = random.Random(seed)
        run = Run(device, kind, captured)
        done = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "capture: .* is not replayed|Full backward hook is firing")
            for _ in range(10):
                run.train(choice.randrange(1, 6))
                done.append(choice.choice(list(CHANGES)))
                with contextlib.suppress(RuntimeError):  # a frozen parameter accepts no hook
                    CHANGES[done[-1]](run.trainer)
            run.train(4)
        found.append(run.found())
    assert all(same(*found)), f"seed {seed}, {kind}: {done}"


def train(device: str, step: Callable[[torch.Tensor], torch.Tensor], calls: int, between: Any = None) -> Any:
    captured: Any = allranks.capture(step) if device != "cpu" else step
    found = []
    for number in range(calls):
        found.append(captured(torch.full((3,), float(number), device=device)).cpu())
        if between is not None:
            between(number)
    return found, captured


def a_step(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone()

    return step


def test_warning_names_a_number_that_changes_before_each_call(mw: Master) -> None:
    found = []
    for device in ("cpu", "worker:1"):
        weight = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        step = a_step(weight, optimizer)

        def warm_up(number: int, scheduler: Any = scheduler) -> None:
            if number < 10:
                scheduler.step()

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses, captured = train(device, step, 16, warm_up)
        found.append(losses)
    assert same(*found) == [True] * 16
    assert captured.recordings == 1  # after the warm-up
    (warning,) = told
    assert warning.filename == __file__
    assert re.search(
        r"step is not replayed, because \S+param_groups\[0\]\['lr'\] \(0\.\d+, then 0\.\d+\) changes before each call",
        str(warning.message),
    )


def test_changing_a_learning_rate_on_the_worker_needs_no_new_recording(mw: Master) -> None:
    found = []
    for device in ("cpu", "worker:1"):
        torch.manual_seed(0)
        weight = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=torch.tensor(1.0, device=device), fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        step = a_step(weight, optimizer)

        losses, captured = train(device, step, 10, lambda number, scheduler=scheduler: scheduler.step())
        found.append(losses)
    assert same(*found) == [True] * 10
    assert captured.recordings == 1


COUNTS: dict[str, Any] = {"n": 0, "list": []}


def test_step_that_changes_values_it_reads_is_not_replayed(mw: Master) -> None:
    class Counter:
        n = 0

    counter, numbers, count = Counter(), iter(range(100)), torch.zeros(())

    def attribute(x: torch.Tensor) -> torch.Tensor:
        counter.n += 1
        return x * (2 if counter.n % 6 else 3)

    def entry(x: torch.Tensor) -> torch.Tensor:
        COUNTS["n"] += 1
        return x * (2 if COUNTS["n"] % 6 else 3)

    def grows(x: torch.Tensor) -> torch.Tensor:
        COUNTS["list"].append(x.detach())
        return x * (2 if len(COUNTS["list"]) % 6 else 3)

    def tensor(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * (2 if count % 6 else 3)

    def iterator(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if next(numbers) % 6 == 5 else 2)

    def draws(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if random.random() < 0.8 else 3)

    def draws_of_torch(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.rand(()) < 0.8 else 3)

    for step, said in (
        (attribute, r"it changes counter\.n \(\d, then \d\) on each call"),
        (entry, r"it changes COUNTS\['n'\] \(\d, then \d\) on each call"),
        (grows, r"it changes COUNTS\['list'\] on each call"),
        (tensor, "it changes count on each call"),
        (iterator, "it uses the iterator numbers"),
        (draws, "it draws random numbers of the master on each call"),
        (draws_of_torch, "it draws random numbers of the master on each call"),
    ):
        found = []
        for device in ("cpu", "worker:1"):
            counter.n, COUNTS["n"], numbers, count = 0, 0, iter(range(100)), torch.zeros(())
            COUNTS["list"].clear()
            random.seed(5)
            torch.manual_seed(5)
            if device == "cpu":
                found.append(train(device, step, 14)[0])
                continue
            with pytest.warns(UserWarning, match=f"is not replayed, because {said}"):
                found.append(train(device, step, 14)[0])
        assert same(*found) == [True] * 14, step


def test_adam_that_counts_steps_in_python_is_not_replayed(mw: Master) -> None:
    found = []
    for device in ("cpu", "worker:1"):
        run = Run(device, "adam", captured=device != "cpu")
        if device == "cpu":
            run.train(8)
        else:
            with pytest.warns(UserWarning, match=r"it changes \S+state\S+ on each call(.|\n)*fused=True"):
                run.train(8)
        found.append(run.found())
    assert all(same(*found))


def test_each_value_of_an_alternating_flag_is_recorded_once(mw: Master) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)).to("worker:1")

    @allranks.capture(max_recordings=2)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return net(x).detach()

    x = torch.ones(2, 3, device="worker:1")
    for _ in range(4):
        for mode in (True, False):
            net.train(mode)
            for _ in range(4):
                assert forward(x).cpu().any() == (not mode)
        assert forward.recordings == 2
    net[1].p = 0.0
    for mode in (True, False, True, False):
        net.train(mode)
        for _ in range(3):
            assert forward(x).cpu().any()
    assert forward.recordings == 2  # new recordings replace the oldest


def test_changes_of_arguments_are_noticed(mw: Master) -> None:
    net = nn.Dropout(1.0)
    config = Config(scale=2.0)

    @allranks.capture
    def forward(net: nn.Module, x: torch.Tensor, by: float) -> torch.Tensor:
        return net(x) + by * config.scale

    x = torch.ones(3, device="worker:1")
    for mode in (True, False, True):
        net.train(mode)
        for _ in range(4):
            assert forward(net, x, 0.0).sum().item() == (0 if mode else 3)
    for by in (0.0, -0.0):
        for _ in range(4):
            assert math.copysign(1, forward(net, x * 0, by).cpu()[0].item()) == math.copysign(1, 0.0 + by)


def test_replay_respects_the_current_device_and_grad_mode(mw: Master) -> None:
    made: Any = allranks.capture(lambda x: x * torch.ones(2, device="worker"))
    plain: Any = allranks.capture(lambda x: x + torch.ones(2))
    weight = torch.ones(2, device="worker:1", requires_grad=True)

    @allranks.capture
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).detach() * int((x * weight).requires_grad)

    for _ in range(4):
        for rank in (1, 2):
            with torch.worker.device(rank):  # type: ignore[attr-defined]
                assert made(torch.ones(2, device=f"worker:{rank}")).device.index == rank
            with torch.device(f"worker:{rank}"):
                assert plain(torch.ones(2)).device.index == rank
        x = torch.ones(2, device="worker:1")
        assert gradient(x).cpu().tolist() == [1.0, 1.0]
        with torch.no_grad():
            assert gradient(x).cpu().tolist() == [0.0, 0.0]


def test_removed_hooks_and_gradients_from_outside_are_noticed(mw: Master) -> None:
    found = []
    for device, captured in (("cpu", False), ("worker:1", True)):
        run = Run(device, "sgd", captured)
        weight = run.trainer.net.first.weight
        handle = weight.register_hook(lambda grad: grad * 2)
        run.train(6)
        assert not captured or run.call.recordings == 1
        handle.remove()
        run.train(6)
        leave_gradients(run.trainer)
        run.train(4)
        found.append(run.found())
    assert all(same(*found))


def test_captured_model_can_be_moved_and_freed(mw: Master) -> None:
    def tensors() -> int:
        gc.collect()
        return int(torch.worker.memory_stats("worker:1")["tensors"])  # type: ignore[attr-defined]

    before = tensors()
    held = {"net": nn.Linear(3, 3).to("worker:1")}
    forward: Any = allranks.capture(lambda x: held["net"](x).detach())
    for _ in range(4):
        forward(torch.ones(1, 3, device="worker:1"))
    net = held["net"]
    parameters = list(net.parameters())
    net.cpu()
    assert list(map(id, net.parameters())) == list(map(id, parameters))
    net.to("worker:1")
    with torch.no_grad():
        net.weight.fill_(0.0)
        net.bias.fill_(7.0)
    for _ in range(4):
        assert forward(torch.ones(1, 3, device="worker:1")).cpu().tolist() == [[7.0] * 3]
    del net, parameters
    held["net"] = nn.Linear(3, 3).to("worker:1")
    forward(torch.ones(1, 3, device="worker:1"))
    assert tensors() == before + 2


def test_step_that_reads_too_many_values_is_refused(mw: Master) -> None:
    many = [[each] for each in range(200_001)]
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for step, name in ((lambda x: x + len(many), "many"), (lambda x: x + len(deep), "deep")):
        with pytest.raises(UsageError, match=rf"the step can read more values than can be compared.* in\s+{name}"):
            allranks.capture(step)(torch.ones(1, device="worker:1"))


def test_equal_values_of_different_type_or_sign_are_changes() -> None:
    for before, after in (
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0.1, np.float64(0.1)),
        ("a", b"a"),
        (1j, complex(-0.0, 1)),
    ):
        values = [before]
        watch = ReachableValues().watch(values)
        assert watch.same([type(before)(str(before)) if type(before) in (int, float) else before])
        assert not watch.same([after])
        ((path, was, now),) = watch.changes([after])
        assert (path, repr(was), repr(now)) == ("[0]", repr(before), repr(after))
    assert ReachableValues().watch([float("nan")]).same([float("nan")])
    circle: list[Any] = [1]
    circle.append(circle)
    assert ReachableValues().watch(circle).same(circle)
