"""The pieces of text that random training programs are assembled from: data, model, optimizer, one step, logs, epochs.

In a piece, ``$name`` is an object of the training. It is written as ``name``, or as ``self.name`` in a Trainer class. A
line ``<die: place>`` is a candidate for the kill.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from random_programs_choices import Choices

__all__ = ["GROUPS", "PIECES", "Draft", "format_call", "indent", "split_lines"]

_WIDTH = 16  # features of a sample
_CLASSES = 3
_BATCH = 4

_MODELS = {
    "mlp_dropout": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Linear(WIDTH, 12)
                self.dropout = nn.Dropout(0.2)
                self.output = nn.Linear(12, OUT)

            def forward(self, x):
                x = self.dropout(F.relu(self.hidden(x)))
                <die: forward>
                return self.output(x)
        """,
    "batchnorm": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Linear(WIDTH, 12)
                self.norm = nn.BatchNorm1d(12)
                self.output = nn.Linear(12, OUT)

            def forward(self, x):
                x = F.relu(self.norm(self.hidden(x)))
                <die: forward>
                return self.output(x)
        """,
    "attention": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
                self.norm = nn.LayerNorm(4)
                self.output = nn.Linear(WIDTH, OUT)

            def forward(self, x):
                tokens = x.view(len(x), -1, 4)
                attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
                <die: forward>
                tokens = self.norm(tokens + attended)
                return self.output(tokens.flatten(1))
        """,
    "nonpersistent_buffer": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Linear(WIDTH, WIDTH)
                self.output = nn.Linear(WIDTH, OUT)
                self.register_buffer("frequencies", torch.linspace(0.1, 1.0, WIDTH), persistent=False)

            def forward(self, x):
                x = torch.tanh(self.hidden(x)) * torch.cos(self.frequencies)
                <die: forward>
                return self.output(x)
        """,
    "counter_buffer": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Linear(WIDTH, 12)
                self.output = nn.Linear(12, OUT)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                if self.training:
                    COUNT
                <die: forward>
                # The temperature decreases during training.
                return self.output(F.relu(self.hidden(x))) / (1 + 1 / (1 + self.calls))
        """,
    "counter_attribute": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden = nn.Linear(WIDTH, 12)
                self.output = nn.Linear(12, OUT)
                self.calls = 0

            def forward(self, x):
                if self.training:
                    self.calls += 1
                <die: forward>
                # The temperature decreases during training.
                return self.output(F.relu(self.hidden(x))) / (1 + 1 / (1 + self.calls))
        """,
    "submodule_named_module": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.module = nn.Linear(WIDTH, 12)
                self.head = nn.Linear(12, OUT)

            def forward(self, x):
                x = F.relu(self.module(x))
                <die: forward>
                return self.head(x)
        """,
}


@dataclass
class Draft:
    """The sections of a program while it is written."""

    rng: random.Random
    choices: Choices
    imports: set[str] = field(default_factory=set)
    definitions: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    after_state: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    forgettable: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    begin: list[str] = field(default_factory=list)
    step: list[str] = field(default_factory=list)
    after_step: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    evaluation: list[str] = field(default_factory=list)
    after_evaluation: list[str] = field(default_factory=list)
    final: dict[str, str] = field(default_factory=dict)

    def add(self, section: list[str], text: str) -> None:
        section.extend(split_lines(text))

    def part(self, name: str, shown: str = "", forgettable: bool = True) -> None:
        """Pass ``$name`` to State, and to the final report unless ``shown`` is "-"."""
        self.parts[name] = f"${name}"
        if forgettable:
            self.forgettable.append(name)
        if shown != "-":
            self.final[name] = shown or f"${name}"


def split_lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line if line else "" for line in lines]


# --- setup ---


def _begin(d: Draft) -> None:
    c = d.choices
    if c.frontend == "allranks":
        d.imports |= {"import allranks as dist"}
        d.add(d.setup, "dist.init_process_group(timeout=30)")
    else:
        d.imports |= {"import torch.distributed as dist", "import allranks"}
        d.add(d.setup, 'dist.init_process_group("allranks")')
    d.imports |= {"import torch", "from torch import nn", "import torch.nn.functional as F"}
    d.add(d.setup, f"torch.manual_seed({d.rng.randint(0, 99)})")
    if c.augmentation == "getitem_random":
        d.imports |= {"import random"}
        d.add(d.setup, "random.seed(dist.get_rank())")
    if c.augmentation == "getitem_numpy":
        d.imports |= {"import numpy as np"}
        d.add(d.setup, "np.random.seed(dist.get_rank())")
    if c.dtype == "float64":
        d.add(d.setup, "torch.set_default_dtype(torch.float64)")


def _is_regression(c: Choices) -> bool:
    return c.loss == "mse"


def _targets(c: Choices, inputs: str) -> str:
    """Return the expression of the targets of inputs."""
    if _is_regression(c):
        return f"{inputs}.sum(1, keepdim=True).sin()"
    return f"({inputs}.sum(1) > 0).long() + ({inputs}[:, 0] > 1).long()"


def _data(d: Draft) -> None:
    c = d.choices
    per_rank = c.steps * _BATCH
    if c.loader == "number":
        return
    if c.loader == "list":
        d.add(
            d.setup,
            f"""
            generator = torch.Generator().manual_seed(100 + dist.get_rank())
            $batches = []
            for _ in range({c.steps}):
                inputs = torch.randn({_BATCH}, {_WIDTH}, generator=generator)
                $batches.append((inputs, {_targets(c, "inputs")}))
            """,
        )
        return
    if c.loader == "iterable_dataset":
        d.imports |= {"from torch.utils.data import DataLoader, IterableDataset"}
        d.add(
            d.definitions,
            f"""
            class Stream(IterableDataset):
                def __init__(self, seed, count):
                    self.seed, self.count = seed, count

                def __iter__(self):
                    generator = torch.Generator().manual_seed(self.seed)
                    for _ in range(self.count):
                        x = torch.randn(1, {_WIDTH}, generator=generator)
                        <die: loading a sample>
                        yield x[0], ({_targets(c, "x")})[0]


            """,
        )
        collate = _collate(d)
        d.add(
            d.setup,
            f"""
            stream = Stream(dist.get_rank(), {per_rank})
            $loader = DataLoader(stream, batch_size={_BATCH}{collate})
            """,
        )
        return
    samplers = {
        "allranks_sampler": ["DataLoader"],
        "torch_sampler": ["DataLoader"],
        "shuffle_generator": ["DataLoader"],
        "random_sampler": ["DataLoader", "RandomSampler"],
    }
    names = samplers[c.loader]
    everything = per_rank * (c.ranks if c.loader.endswith("_sampler") and c.loader != "random_sampler" else 1)
    rest = d.rng.choice([0, 1, 3])  # an incomplete last batch is dropped
    if c.augmentation.startswith("getitem"):
        names += ["Dataset"]
        noise = {
            "getitem_torch": f"x = x + 0.1 * torch.randn({_WIDTH})",
            "getitem_random": "if random.random() < 0.5:\n                        x = -x",
            "getitem_numpy": f"x = x + torch.from_numpy(np.random.normal(0, 0.1, {_WIDTH})).to(x.dtype)",
        }[c.augmentation]
        d.add(
            d.definitions,
            f"""
            class Samples(Dataset):
                def __init__(self, count):
                    self.inputs = torch.randn(count, {_WIDTH})
                    self.targets = {_targets(c, "self.inputs")}

                def __len__(self):
                    return len(self.inputs)

                def __getitem__(self, index):
                    x = self.inputs[index]
                    {noise}
                    {"<die: loading a sample>" if c.workers == "none" else ""}
                    return x, self.targets[index]


            """,
        )
        d.add(d.setup, f"data = Samples({everything + rest})")
    else:
        names += ["TensorDataset"]
        d.add(
            d.setup,
            f"""
            inputs = torch.randn({everything + rest}, {_WIDTH})
            data = TensorDataset(inputs, {_targets(c, "inputs")})
            """,
        )
    d.imports |= {f"from torch.utils.data import {', '.join(sorted(names))}"}
    workers = {
        "none": "",
        "two": ", num_workers=2",
        "two_persistent": ", num_workers=2, persistent_workers=True",
    }[c.workers]
    more = f"{workers}{_collate(d)}, drop_last=True"
    rank = " + dist.get_rank()" if c.generator_seed == "per_rank" else ""
    if c.loader == "shuffle_generator":
        d.add(d.setup, f"$generator = torch.Generator().manual_seed(7{rank})")
        arguments = ["data", f"batch_size={_BATCH}", "shuffle=True", "generator=$generator"]
        d.add(d.setup, format_call(d.choices, "$loader = DataLoader", [*arguments, *more.strip(", ").split(", ")]))
        d.part("generator")
    elif c.loader == "random_sampler":
        d.add(
            d.setup,
            f"""
            $generator = torch.Generator().manual_seed(7{rank})
            sampler = RandomSampler(data, generator=$generator)
            """,
        )
        arguments = ["data", f"batch_size={_BATCH}", "sampler=sampler", *more.strip(", ").split(", ")]
        d.add(d.setup, format_call(d.choices, "$loader = DataLoader", arguments))
        d.part("generator")
    else:
        if c.loader == "torch_sampler" or c.frontend == "torch":
            d.imports |= {"from torch.utils.data.distributed import DistributedSampler"}
            sampler = "DistributedSampler"
        else:
            sampler = "dist.data.DistributedSampler"
        d.add(d.setup, f"$sampler = {sampler}(data, drop_last=True)")
        arguments = ["data", f"batch_size={_BATCH}", "sampler=$sampler", *more.strip(", ").split(", ")]
        d.add(d.setup, format_call(d.choices, "$loader = DataLoader", arguments))


def _collate(d: Draft) -> str:
    if d.choices.augmentation != "collate":
        return ""
    die = "<die: loading a batch>" if d.choices.workers == "none" else ""
    d.add(
        d.definitions,
        f"""
        def collate(samples):
            inputs = torch.stack([x for x, _ in samples])
            {die}
            inputs = inputs * (1 + 0.1 * torch.randn(len(inputs), 1))
            return inputs, torch.stack([y for _, y in samples])


        """,
    )
    return ", collate_fn=collate"


def _model(d: Draft) -> None:
    c = d.choices
    out = 1 if _is_regression(c) else _CLASSES
    if c.scheme == "gan":
        d.add(
            d.setup,
            f"""
            generator_net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, {_WIDTH}))
            critic_net = nn.Sequential(nn.Linear({_WIDTH}, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
            """,
        )
        d.add(d.setup, f"$faker = {_wrapped(d, 'generator_net')}\n$critic = {_wrapped(d, 'critic_net')}")
        d.part("faker", forgettable=False)
        d.part("critic", forgettable=False)
        _by_hand(d)
        return
    if c.model == "linear":
        made = f"nn.Linear({_WIDTH}, {out})"
    elif c.model == "sequential_batchnorm":
        layers = f"nn.Linear({_WIDTH}, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, {out})"
        d.add(d.setup, f"net = nn.Sequential({layers})")
        made = "net"
    else:
        made = "Net()"
        count = d.rng.choice(["self.calls += 1", "self.calls += 1", "self.calls = self.calls + 1"])
        text = _MODELS[c.model].replace("WIDTH", str(_WIDTH)).replace("OUT", str(out)).replace("COUNT", count)
        d.add(d.definitions, text + "\n\n")
        d.definitions += ["", ""]
    if c.wrapper == "fully_shard":
        d.imports |= {
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.fsdp import fully_shard",
        }
        d.add(
            d.setup,
            f"""
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            $model = {made}
            fully_shard($model, mesh=mesh)
            """,
        )
    elif c.wrapper == "by_hand":
        d.add(d.setup, f"$model = {made}")
    else:
        d.add(d.setup, f"$model = {_wrapped(d, made)}")
    d.part("model", forgettable=False)
    _by_hand(d)


def _wrapped(d: Draft, module: str) -> str:
    wrapper = {"allranks_ddp": "dist.DistributedDataParallel", "torch_ddp": "nn.parallel.DistributedDataParallel"}
    name = wrapper.get(d.choices.wrapper)
    return f"{name}({module})" if name else module


def _by_hand(d: Draft) -> None:
    if d.choices.wrapper == "by_hand":
        d.add(
            d.definitions,
            """
            def average_gradients(model):
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    <die: averaging gradients>
                    parameter.grad /= dist.get_world_size()


            """,
        )


def _inner(c: Choices) -> str:
    """Return the expression of the module in the wrapper."""
    return "$model" if c.wrapper in ("by_hand", "fully_shard") else "$model.module"


def _generator_of_noise(d: Draft) -> None:
    c = d.choices
    rank = " + dist.get_rank()" if c.generator_seed == "per_rank" else ""
    if c.augmentation == "torch_generator":
        d.add(d.setup, f"$noise = torch.Generator().manual_seed(5{rank})")
        d.part("noise")
    elif c.augmentation == "numpy_generator":
        d.imports |= {"import numpy as np"}
        d.add(d.setup, f"$noise = np.random.default_rng(5{rank})")
        d.part("noise")


def _optimizer_of(name: str, parameters: str) -> str:
    arguments = {
        "SGD": "lr=0.1",
        "momentum": "lr=0.05, momentum=0.9",
        "Adam": "lr=0.01",
        "AdamW": "lr=0.01, weight_decay=0.01",
        "RMSprop": "lr=0.005",
        "Adagrad": "lr=0.05",
        "LBFGS": "lr=0.5, max_iter=3",
    }[name]
    return f"torch.optim.{'SGD' if name == 'momentum' else name}({parameters}, {arguments})"


def _optimizers(d: Draft) -> None:
    c = d.choices
    if c.scheme == "gan":
        d.add(d.setup, f"$optimizer = {_optimizer_of(c.optimizer, '$faker.parameters()')}")
        d.add(d.setup, f"$critic_optimizer = {_optimizer_of(c.optimizer, '$critic.parameters()')}")
        d.part("optimizer", forgettable=False)
        d.part("critic_optimizer", forgettable=False)
    elif c.scheme == "two_optimizers":
        head = _optimizer_of(d.rng.choice(["SGD", "Adam"]), "parameters[2:]")
        d.add(
            d.setup,
            f"""
            parameters = list($model.parameters())
            $optimizer = {_optimizer_of(c.optimizer, "parameters[:2]")}
            $head_optimizer = {head}
            """,
        )
        d.part("optimizer", forgettable=False)
        d.part("head_optimizer", forgettable=False)
    else:
        d.add(d.setup, f"$optimizer = {_optimizer_of(c.optimizer, '$model.parameters()')}")
        d.part("optimizer", forgettable=False)
    schedulers = {
        "StepLR": "StepLR($optimizer, step_size=3, gamma=0.5)",
        "ExponentialLR": "ExponentialLR($optimizer, gamma=0.9)",
        "OneCycleLR": "OneCycleLR($optimizer, max_lr=0.1, total_steps=60)",
        "CosineAnnealingLR": "CosineAnnealingLR($optimizer, T_max=20)",
        "ReduceLROnPlateau": "ReduceLROnPlateau($optimizer, factor=0.5, patience=0)",
    }
    if made := schedulers.get(c.scheduler):
        d.add(d.setup, f"$scheduler = torch.optim.lr_scheduler.{made}")
        d.part("scheduler")
    if c.scaler:
        d.add(d.setup, '$scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)')
        d.part("scaler")


def _averaged(d: Draft) -> None:
    c, inner = d.choices, _inner(d.choices)
    if c.averaging == "averaged_model":
        d.imports |= {"from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn"}
        average = d.rng.choice(["", ", multi_avg_fn=get_ema_multi_avg_fn(0.9)"])
        if not average:
            d.imports -= {"from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn"}
            d.imports |= {"from torch.optim.swa_utils import AveragedModel"}
        d.add(d.setup, f"$averaged = AveragedModel({inner}{average})")
        d.part("averaged")
    elif c.averaging == "ema_dict":
        d.add(
            d.setup,
            f"""
            $averaged = {{}}
            for name, value in {inner}.named_parameters():
                $averaged[name] = value.detach().clone()
            """,
        )
        d.part("averaged")
    elif c.averaging == "ema_model":
        d.imports |= {"import copy"}
        d.add(d.setup, f"$averaged = copy.deepcopy({inner})")
        d.part("averaged")
    elif c.averaging == "target":
        d.imports |= {"import copy"}
        d.add(d.setup, f"$target = copy.deepcopy({inner})")
        d.part("target")


def _running_weight(d: Draft) -> None:
    c = d.choices
    if c.loss == "weight_tensor":
        d.add(d.setup, f"$class_counts = torch.ones({_CLASSES})")
        d.part("class_counts")
    elif c.loss == "weight_number":
        d.add(d.setup, '$scale = {"loss": 1.0}')
        d.part("scale")
    elif c.loss == "weight_array":
        d.imports |= {"import numpy as np"}
        d.add(d.setup, f"$class_counts = np.ones({_CLASSES})")
        d.part("class_counts")


def _containers(d: Draft) -> None:
    """Write the containers of values that are equal on all ranks."""
    c = d.choices
    if c.evaluation != "none" or c.container == "history":
        keys = ["loss"] if c.container == "history" or c.evaluation == "metric_after_optimizer" else []
        keys += ["accuracy"] if c.evaluation == "section" else []
        d.add(d.setup, "$history = {" + ", ".join(f'"{key}": []' for key in keys) + "}")
        d.part("history")
    name, made, module = {
        "counter": ("seen", "Counter()", "from collections import Counter"),
        "defaultdict": ("seen", "defaultdict(list)", "from collections import defaultdict"),
        "namedtuple": ("progress", '{"now": Snapshot(0, torch.zeros(2))}', "from collections import namedtuple"),
        "deque": ("recent", "deque(maxlen=4)", "from collections import deque"),
        "array": ("histogram", f"np.zeros({_CLASSES}, dtype=np.int64)", "import numpy as np"),
        "tensor": ("total", "torch.zeros(2)", ""),
    }.get(c.container, ("", "", ""))
    if not name:
        return
    d.imports |= {module} - {""}
    if c.container == "namedtuple":
        d.add(d.definitions, 'Snapshot = namedtuple("Snapshot", "steps losses")\n\n\n')
        d.definitions += ["", ""]
    d.add(d.setup, f"${name} = {made}")
    d.part(name)


_BAR = """
    class Bar:
        def __init__(self, total):
            self.total, self.done, self.text = total, 0, ""

        def update(self, count=1):
            self.done += count

        def set_postfix(self, **values):
            self.text = ", ".join(f"{name}={value}" for name, value in values.items())
    """
_PROGRESS = """
    class Progress:
        def __init__(self, steps):
            self.steps = steps

        def __iter__(self):
            shown = 0
            for step in self.steps:
                yield step
                shown += 1
            if dist.get_rank() == 0:
                print(f"{shown} steps")
    """
_METER = """
    class AverageMeter:
        def __init__(self):
            self.sum = self.count = 0

        def update(self, value, count):
            self.sum += value * count
            self.count += count
    """


def _logs(d: Draft) -> None:
    """Write the logs of each step. If the values differ between ranks, the log is local and not compared."""
    c = d.choices

    def is_local(name: str) -> None:
        d.local.append(name)
        d.forgettable.append(name)

    if c.logging == "running_loss_local":
        is_local('"running_loss"')
    elif c.logging in ("list", "list_local"):
        d.add(d.setup, "$losses = []")
        d.part("losses") if c.logging == "list" else is_local("$losses")
    elif c.logging in ("meter", "meter_local"):
        d.add(d.definitions, _METER)
        d.add(d.setup, "$meter = AverageMeter()")
        d.part("meter", "vars($meter)") if c.logging == "meter" else is_local("$meter")
    elif c.logging == "progress_bar":
        d.add(d.definitions, _BAR)
        d.add(d.setup, f"$bar = Bar({c.steps * c.epochs})")
        is_local("$bar")
    elif c.logging == "progress_loop":
        d.add(d.definitions, _PROGRESS)
    if c.global_step == "in_dict":
        d.add(d.setup, '$counters = {"steps": 0}')
        d.part("counters")
    elif c.global_step == "variable":
        d.add(d.setup, "$global_step = 0")
        d.final["global_step"] = "$global_step"
        if c.style == "trainer":
            d.parts["trainer"] = "self"


def _early_stopping_state(d: Draft) -> None:
    if d.choices.early_stopping == "variables":
        d.add(d.setup, "$best, $bad = -1.0, 0")
        d.final["best"] = "($best, $bad)"
        if d.choices.style == "trainer":
            d.parts["trainer"] = "self"
    elif d.choices.early_stopping != "none":
        d.add(d.setup, '$best = {"accuracy": -1.0, "bad": 0}')
        d.part("best")


def _state(d: Draft) -> None:
    c = d.choices
    forgotten = d.rng.choice(d.forgettable) if c.forgotten and d.forgettable else ""
    c.forgotten = bool(forgotten)
    arguments = [f"{name}={value}" for name, value in d.parts.items() if name != forgotten]
    if local := [name for name in d.local if name != forgotten]:
        arguments.append(f"local=[{', '.join(local)}]")
    api = "dist" if c.frontend == "allranks" else "allranks"
    if c.checkpoints:
        every = d.rng.choice([2, 3, 5])
        arguments.append(f'checkpoints={api}.resilience.Checkpoints("checkpoints", every={every})')
    d.setup.append("<die: before State>")
    d.add(d.setup, format_call(c, f"$state = {api}.resilience.State", arguments))


def format_call(c: Choices, function: str, arguments: Sequence[str]) -> str:
    """Return a call, with its arguments on separate lines if the call is long."""
    more = 4 if c.style == "trainer" else -1  # characters that replace each "$"

    def width(text: str) -> int:
        return len(text) + more * text.count("$")

    line = f"{function}({', '.join(arguments)})"
    if width(line) <= 96:
        return line
    text = f"{function}(\n"
    row = "   "
    for argument in arguments:
        if width(row + argument) > 94:
            text += row + "\n"
            row = "   "
        row += f" {argument},"
    return f"{text}{row}\n)"


# --- one step ---


def _step(d: Draft) -> None:
    c = d.choices
    step = d.step
    step.append("<die: step begin>")
    if c.loader == "number":
        d.add(step, f"inputs = torch.randn({_BATCH}, {_WIDTH})\ntargets = {_targets(c, 'inputs')}")
    else:
        d.add(step, "inputs, targets = step.batch")
    if c.in_place:
        d.add(step, d.rng.choice(["inputs.sub_(inputs.mean()).div_(inputs.std())", "inputs.mul_(0.5).add_(0.1)"]))
    if c.augmentation == "step":
        d.add(
            step,
            d.rng.choice(
                [
                    "inputs = inputs + 0.1 * torch.randn_like(inputs)",
                    "inputs = F.dropout(inputs, 0.1)",
                    "if torch.rand(()) < 0.5:\n    inputs = inputs.flip(1)",
                ]
            ),
        )
    elif c.augmentation == "torch_generator":
        d.add(step, "inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=$noise)")
    elif c.augmentation == "numpy_generator":
        d.add(
            step,
            """
            shift = $noise.normal(0, 0.1, size=inputs.shape)
            inputs = inputs + torch.from_numpy(shift).to(inputs.dtype)
            """,
        )
    if c.scheduler == "warmup_by_hand":
        done = _steps_done(c)
        d.add(
            step,
            f"""
            for group in $optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, ({done} + 1) / 8)
            """,
        )
    elif c.scheduler_at == "step_before":
        d.add(step, "if $state.steps_done:\n    $scheduler.step()")
    _update_running_weight(d)
    history_first = c.container == "history" and c.evaluation != "metric_after_optimizer" and d.rng.random() < 0.5
    {"gan": _gan, "lbfgs": _lbfgs, "sam": _sam}.get(c.scheme, _plain)(d, history_first)
    if (c.container == "history" and not history_first) or c.evaluation == "metric_after_optimizer":
        _append_history(d)
    _update_container(d)
    _log(d)
    step.append("<die: step end>")


def _reduced_loss(d: Draft) -> list[str]:
    return split_lines("mean_loss = loss.detach().clone()\ndist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)")


def _append_history(d: Draft) -> None:
    d.step += _reduced_loss(d)
    d.step.append("<die: after reducing the metric>")
    d.add(d.step, '$history["loss"].append(mean_loss.item())')


def _update_running_weight(d: Draft) -> None:
    c = d.choices
    if c.loss == "weight_tensor":
        d.add(
            d.step,
            f"""
            counts = F.one_hot(targets, {_CLASSES}).sum(0).to($class_counts.dtype)
            dist.all_reduce(counts)
            $class_counts.mul_(0.9).add_(counts)
            weight = $class_counts / $class_counts.sum()
            <die: after the running weight>
            """,
        )
    elif c.loss == "weight_array":
        d.add(
            d.step,
            f"""
            counts = F.one_hot(targets, {_CLASSES}).sum(0)
            dist.all_reduce(counts)
            $class_counts += counts.numpy()
            weight = torch.from_numpy($class_counts / $class_counts.sum()).to(inputs.dtype)
            <die: after the running weight>
            """,
        )


def _loss(c: Choices, output: str = "output", targets: str = "targets") -> str:
    if c.loss == "mse":
        return f"F.mse_loss({output}, {targets})"
    if c.loss in ("weight_tensor", "weight_array"):
        return f"F.cross_entropy({output}, {targets}, weight=weight)"
    return f"F.cross_entropy({output}, {targets})"


def _steps_done(c: Choices) -> str:
    """Return the expression of the number of steps before this one."""
    return {"variable": "$global_step", "in_dict": '$counters["steps"]'}.get(c.global_step, "$state.steps_done")


def _all_optimizers(c: Choices) -> list[str]:
    return ["$optimizer", "$head_optimizer"] if c.scheme == "two_optimizers" else ["$optimizer"]


def _each(c: Choices, call: str) -> list[str]:
    return [f"{optimizer}.{call}" for optimizer in _all_optimizers(c)]


def _reduce_gradients(c: Choices, model: str = "$model") -> list[str]:
    return [f"average_gradients({model})"] if c.wrapper == "by_hand" else []


def _clip(c: Choices) -> list[str]:
    if not c.clip:
        return []
    unscale = [f"$scaler.unscale_({optimizer})" for optimizer in _all_optimizers(c)] if c.scaler else []
    return [*unscale, "nn.utils.clip_grad_norm_($model.parameters(), 1.0)"]


def _backward(c: Choices, loss: str) -> list[str]:
    if c.scaler:
        return [f"$scaler.scale({loss}).backward()"]
    return [f"{loss}.backward()" if loss.isidentifier() else f"({loss}).backward()"]


def _after_update(d: Draft) -> list[str]:
    """Return the lines after the optimizer's step: scheduler and averaged weights."""
    c, inner = d.choices, _inner(d.choices)
    lines = ["<die: after the optimizer>"]
    if c.scheduler_at == "step_after":
        lines += ["$scheduler.step()", "<die: after the scheduler>"]
    if c.averaging == "averaged_model":
        lines += [f"$averaged.update_parameters({inner})"]
    elif c.averaging == "ema_dict":
        if d.rng.random() < 0.6:
            update = "$averaged[name].mul_(0.9).add_(value, alpha=0.1)"
        else:
            update = "$averaged[name] = 0.9 * $averaged[name] + 0.1 * value"
        lines += ["with torch.no_grad():", f"    for name, value in {inner}.named_parameters():", f"        {update}"]
    elif c.averaging == "ema_model":
        lines += [
            f"for slow, fast in zip($averaged.parameters(), {inner}.parameters()):",
            "    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)",
        ]
    elif c.averaging == "target":
        lines += [f"if {_steps_done(c)} % 3 == 0:", f"    $target.load_state_dict({inner}.state_dict())"]
    if c.averaging != "none":
        lines += ["<die: after averaging the weights>"]
    return lines


def _forward(d: Draft) -> list[str]:
    c = d.choices
    lines = ["output = $model(inputs)"]
    if d.rng.random() < 0.4:
        lines += ["<die: after forward>"]
    elif c.scheme != "lbfgs":
        lines += ["<die: in backward>"]
    lines += [f"loss = {_loss(c)}"]
    if c.averaging == "target":
        lines += ["with torch.no_grad():", "    goal = $target(inputs)", "loss = loss + 0.1 * F.mse_loss(output, goal)"]
    if c.loss == "weight_number":
        lines += [
            *_reduced_loss(d),
            '$scale["loss"] = 0.9 * $scale["loss"] + 0.1 * mean_loss.item()',
            "<die: after the running weight>",
            'loss = loss / $scale["loss"]',
        ]
    return lines


def _plain(d: Draft, history_first: bool) -> None:
    c = d.choices
    if c.accumulation == "no_sync":
        _no_sync(d)
        return
    every = d.rng.choice([2, 3])
    over_steps = c.accumulation.startswith("over_steps")
    zero = _each(c, "zero_grad()")
    lines: list[str] = []
    if not over_steps:
        lines += zero
    elif c.accumulation == "over_steps_zero_at_begin":
        lines += [f"if step.index % {every} == 0:", *indent(zero)]
    lines += _forward(d)
    if history_first:
        lines += [*_reduced_loss(d), '$history["loss"].append(mean_loss.item())']
    lines += ["<die: before backward>"]
    update = _backward(c, f"loss / {every}" if over_steps else "loss")
    last = [*_reduce_gradients(c), "<die: after backward>", *_clip(c)]
    if c.scaler:
        last += [f"$scaler.step({optimizer})" for optimizer in _all_optimizers(c)] + ["$scaler.update()"]
    else:
        first, *others = _each(c, "step()")
        last += [first]
        if others:
            last += ["<die: between the optimizers>", *others]
    after = _after_update(d)
    if over_steps:
        end = zero if c.accumulation == "over_steps_zero_at_end" else []
        lines += [*update, f"if (step.index + 1) % {every} == 0:", *indent([*last, *end, *after])]
    elif c.caught:
        lines += [
            "try:",
            *indent([*update, *last]),
            "except RuntimeError as error:  # out of memory: skip the batch",
            '    print(f"skipped a batch: {error}")',
            *indent(zero),
            *after,
        ]
    else:
        lines += [*update, *last, *after]
    d.step += lines


def _no_sync(d: Draft) -> None:
    c = d.choices
    d.imports |= {"import contextlib"}
    update = [f"$scaler.step({optimizer})" for optimizer in _all_optimizers(c)] + ["$scaler.update()"]
    context = "contextlib.nullcontext() if last else $model.no_sync()"
    d.step += [
        *_each(c, "zero_grad()"),
        "for part, (x, y) in enumerate(zip(inputs.chunk(2), targets.chunk(2))):",
        "    last = part == 1",
        f"    with {context}:",
        "        output = $model(x)",
        f"        loss = {_loss(c, 'output', 'y')} / 2",
        "        <die: before backward>",
        *indent(_backward(c, "loss"), 2),
        "<die: after backward>",
        *_clip(c),
        *(update if c.scaler else _each(c, "step()")),
        *_after_update(d),
    ]


def _gan(d: Draft, history_first: bool) -> None:
    c = d.choices
    d.step += [
        "fake = $faker(torch.randn(len(inputs), 8))",
        "$critic_optimizer.zero_grad()",
        "loss = F.softplus(-$critic(inputs)).mean() + F.softplus($critic(fake.detach())).mean()",
        "<die: before backward>",
        "loss.backward()",
        *_reduce_gradients(c, "$critic"),
        "<die: after backward>",
        *(["nn.utils.clip_grad_norm_($critic.parameters(), 1.0)"] if c.clip else []),
        "$critic_optimizer.step()",
        "<die: between the optimizers>",
        "$optimizer.zero_grad()",
        "fooled = F.softplus(-$critic(fake)).mean()",
        "<die: before the second backward>",
        "fooled.backward()",
        *_reduce_gradients(c, "$faker"),
        "$optimizer.step()",
        *_after_update(d),
    ]
    if history_first:
        _append_history(d)


def _lbfgs(d: Draft, history_first: bool) -> None:
    c = d.choices
    d.step += [
        "",
        "def closure():",
        "    $optimizer.zero_grad()",
        *indent(_forward(d)),
        "    loss.backward()",
        *indent(_reduce_gradients(c)),
        "    <die: in the closure>",
        "    # Ranks must agree on the loss, on which the number of iterations depends.",
        "    total = loss.detach().clone()",
        "    dist.all_reduce(total, op=dist.ReduceOp.AVG)",
        "    return total",
        "",
        "loss = $optimizer.step(closure)",
        *_after_update(d),
    ]
    if history_first:
        _append_history(d)


def _sam(d: Draft, history_first: bool) -> None:
    c = d.choices
    d.step += [
        "$optimizer.zero_grad()",
        *_forward(d),
        "loss.backward()",
        *_reduce_gradients(c),
        "# Sharpness-aware minimization: the gradient at the worst point nearby.",
        "with torch.no_grad():",
        "    norm = torch.stack([p.grad.norm() for p in $model.parameters()]).norm()",
        "    shifts = [p.grad * (0.05 / (norm + 1e-12)) for p in $model.parameters()]",
        "    for p, shift in zip($model.parameters(), shifts):",
        "        p.add_(shift)",
        "<die: at the shifted weights>",
        "$optimizer.zero_grad()",
        f"({_loss(c, '$model(inputs)')}).backward()" if c.loss == "weight_number" else
        f"{_loss(c, '$model(inputs)')}.backward()",
        *_reduce_gradients(c),
        "with torch.no_grad():",
        "    for p, shift in zip($model.parameters(), shifts):",
        "        p.sub_(shift)",
        "<die: after backward>",
        *_clip(c),
        "$optimizer.step()",
        *_after_update(d),
    ]  # fmt: skip
    if history_first:
        _append_history(d)


def _update_container(d: Draft) -> None:
    c = d.choices
    place = d.step
    updates = {
        "counter": '$seen["even" if step.index % 2 == 0 else "odd"] += 1',
        "defaultdict": '$seen[step.index % 3].append($optimizer.param_groups[0]["lr"])',
        "namedtuple": ('now = $progress["now"]\n$progress["now"] = Snapshot(now.steps + 1, now.losses * 0.9 + 1)'),
        "deque": '$recent.append((step.index, $optimizer.param_groups[0]["lr"]))',
        "array": f"$histogram[step.index % {_CLASSES}] += 1",
        "tensor": "$total += torch.tensor([1.0, step.index])",
    }
    if update := updates.get(c.container):
        if d.rng.random() < 0.5:  # before the commit
            at = _after_batch(place)
            place[at:at] = update.splitlines()
        else:
            place += update.splitlines()


def _after_batch(step: list[str]) -> int:
    """Return the index of the first line after the lines that read the batch."""
    return next(n for n, line in enumerate(step) if "targets =" in line or "targets = step.batch" in line) + 1


def _log(d: Draft) -> None:
    c = d.choices
    has_mean = any("mean_loss = " in line for line in d.step)
    if c.logging in ("list", "meter") and not has_mean:
        d.step += _reduced_loss(d)
    log = {
        "running_loss": "running_loss += loss.item()",
        "running_loss_local": "running_loss += loss.item()",
        "list": "$losses.append(mean_loss.item())",
        "list_local": "$losses.append(loss.item())",
        "meter": "$meter.update(mean_loss.item(), len(inputs))",
        "meter_local": "$meter.update(loss.item(), len(inputs))",
        "enumerate": 'if number % 3 == 0 and dist.get_rank() == 0:\n    print(f"step {number}: {loss.item():.3f}")',
        "progress_bar": '$bar.update()\n$bar.set_postfix(loss=f"{loss.item():.3f}")',
    }
    if c.logging in log:
        d.add(d.step, log[c.logging])
    if c.global_step == "variable":
        d.add(d.step, "$global_step += 1")
    elif c.global_step == "in_dict":
        d.add(d.step, '$counters["steps"] += 1')


# --- epochs ---


def _epoch(d: Draft) -> None:
    c = d.choices
    if c.loader in ("allranks_sampler", "torch_sampler") and c.loop != "steps_only":
        d.add(d.begin, "$sampler.set_epoch(epoch)")
    if c.scheduler_at == "epoch_begin":
        d.add(d.begin, "if epoch:\n    $scheduler.step()")
    d.begin.append("<die: epoch begin>")
    if c.logging.startswith("running_loss"):
        d.add(d.begin, "running_loss = 0.0")
    if c.evaluation == "section":
        d.add(d.begin, "$model.train()")
    d.after_step.append("<die: after the step>")
    if c.loop == "break_section":
        d.add(d.after_step, f"if step.index == {c.steps - 2}:\n    break")
    if c.scheduler_at == "epoch_end":
        d.add(d.end, "$scheduler.step()")
    d.end.append("<die: epoch end>")
    if c.logging.startswith("running_loss"):
        name = "epoch {epoch}: " if c.loop != "steps_only" else ""
        d.add(d.end, f'if dist.get_rank() == 0:\n    print(f"{name}loss {{running_loss / {c.steps}:.4f}}")')


def _evaluation(d: Draft) -> None:
    c = d.choices
    if c.evaluation != "section":
        return
    d.add(d.setup, f"$test_inputs = torch.randn(8, {_WIDTH})\n$test_targets = {_targets(c, '$test_inputs')}")
    if _is_regression(c):
        value = "score = -F.mse_loss(output, $test_targets)"
    else:
        value = "score = (output.argmax(1) == $test_targets).float().mean()"
    inside = split_lines(
        f"""
        $model.eval()
        with torch.no_grad():
            output = $model($test_inputs)
            {value}
        <die: evaluation>
        dist.all_reduce(score, op=dist.ReduceOp.AVG)
        $history["accuracy"].append(score.item())
        """
    )
    if c.scheduler == "ReduceLROnPlateau":
        inside += ["$scheduler.step(-score.item())"]
    newest = "score.item()" if c.early_stopping == "in_step" else '$history["accuracy"][-1]'
    improved = split_lines(
        f"""
        if {newest} > $best["accuracy"]:
            $best["accuracy"], $best["bad"] = {newest}, 0
        else:
            $best["bad"] += 1
        """
    )
    if c.early_stopping == "variables":
        improved = split_lines(
            f"""
            if {newest} > $best:
                $best, $bad = {newest}, 0
            else:
                $bad += 1
            """
        )
    if c.early_stopping == "in_step":
        inside += improved
    inside += ["<die: evaluation end>"]
    d.evaluation += ["for step in $state.steps(1):", "    with step:", *indent(inside, 2)]
    if c.early_stopping in ("after_section", "variables"):
        d.after_evaluation += improved
    if c.early_stopping != "none":
        bad = "$bad" if c.early_stopping == "variables" else '$best["bad"]'
        d.after_evaluation += [f"if {bad} >= 2:", "    break"]


PIECES = (
    _begin, _data, _model, _generator_of_noise, _optimizers, _averaged, _running_weight, _containers, _logs,
    _early_stopping_state, _evaluation, _state, _step, _epoch,
)  # fmt: skip
"""The pieces of a program. The order matters: the setup is written in this order."""

GROUPS = {_data, _model, _optimizers, _containers, _state}
"""Pieces whose lines of the setup follow an empty line."""
