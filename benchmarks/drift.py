"""Flips single bits of replicas: are they found, located and healed, and what does the comparison cost?

    python benchmarks/drift.py --json benchmarks/drift.json
    python benchmarks/drift.py --cost --json benchmarks/drift_cost.json

The first command has two parts, in jobs of three ranks:

- ``check_replicas``: one bit of a parameter, buffer or optimizer state is flipped on one rank. The error must name the
  tensor, the element, the rank, and that one bit differs. The bit is restored.
- ``State(check_every=10)``: in each 10 steps of a training, one bit is flipped on one rank at a random moment: before
  the forward, between forward and backward, or before the optimizer. The final weights must have the bits of an
  undisturbed run. Some flips are overwritten or have no effect before the next comparison. The others must be reported
  with the right element and rank.

The second command measures training steps with a comparison after each one, and without comparisons, in turn. The cost
at the default interval is a hundredth of the difference, which would be too small to measure beside the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

RANKS = 3
EVERY = 10
STEPS_PER_RUN = 500
LEARNING = 2
COST_STEPS = 100
COST_ROUNDS = 15


def make_model() -> Any:
    """Return a small model with a buffer that is equal on all ranks, and one that differs."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)
            self.register_buffer("average", torch.zeros(7, 3))

        def forward(self, x: torch.Tensor) -> Any:
            self.average.mul_(0.9).add_(0.1)
            return self.last(self.norm(self.first(x)).relu())

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Net()


def flip(tensor: Any, element: int, bit: int) -> None:
    """Flip one bit of an element of 32 bits. Like a fault, it does not increment the version counter."""
    import torch

    words = tensor.data.view(-1).view(torch.int32)
    words[element] ^= 1 << bit if bit < 31 else -(1 << 31)


def choose(chance: random.Random, model: Any, optimizer: Any) -> tuple[int, str, Any, int, int]:
    """Return a rank, the name of a tensor, the tensor, an element, and a bit. The same on all ranks."""
    import torch

    parameters = list(model.named_parameters())
    kinds = {
        "parameter": parameters,
        "buffer": [("average", model.average)],
        "optimizer": [
            (f"optimizer.{key}({name})", value)
            for name, parameter in parameters
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.dim()
        ],
    }
    victim = chance.randrange(RANKS)
    name, tensor = chance.choice(kinds[chance.choice(list(kinds))] or parameters)
    return victim, name, tensor, chance.randrange(tensor.numel()), chance.randrange(32)


def index_of(tensor: Any, element: int) -> str:
    import torch

    return str([int(each) for each in torch.unravel_index(torch.tensor(element), tensor.shape)])


def check_main(flips: int, seed: int) -> None:
    """Flip bits, and locate each with check_replicas. Rank 0 prints the number of correct errors."""
    import torch

    import allranks as dist
    from allranks.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    model = make_model()
    wrapper, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    chance, right = random.Random(seed), 0
    for number in range(flips):
        if number % 50 == 0:
            wrapper(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            dist.trace.check_replicas(wrapper, optimizer)
        victim, name, tensor, element, bit = choose(chance, model, optimizer)
        if dist.get_rank() == victim:
            flip(tensor, element, bit)
        expected = (f"differ: {name}{index_of(tensor, element)} is ", f"on rank {victim} (one bit differs).")
        try:
            dist.trace.check_replicas(wrapper, optimizer)
        except dist.MismatchError as error:
            right += all(text in str(error) for text in expected)
        if dist.get_rank() == victim:
            flip(tensor, element, bit)
    if dist.get_rank() == 0:
        print(json.dumps({"flips": flips, "located": right}), flush=True)


def train_main(steps: int, seed: int) -> None:
    """Train with a State, and flip a bit in each interval (seed 0: none). Rank 0 prints a hash of the final weights."""
    import torch

    import allranks as dist
    from allranks.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    model, rank = make_model(), dist.get_rank()
    wrapper = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(rank)
    batches = [(torch.randn(8, 20, generator=source), torch.arange(8) % 5) for _ in range(steps)]
    chance = random.Random(seed)
    # Not in the first steps, in which State learns which values the program makes different.
    moments = [max(start, LEARNING) + chance.uniform(0, EVERY - LEARNING) for start in range(0, steps, EVERY) if seed]
    made: list[tuple[int, str, str]] = []
    reports: list[str] = []
    warnings.showwarning = lambda message, *_, **__: reports.append(str(message))

    def damage(step: float) -> None:
        while len(made) < len(moments) and moments[len(made)] <= step:
            victim, name, tensor, element, bit = choose(chance, model, optimizer)
            if rank == victim:
                flip(tensor, element, bit)
            made.append((victim, name, index_of(tensor, element)))

    local = [batches, moments, made, reports, chance]
    state = dist.resilience.State(model=wrapper, optimizer=optimizer, check_every=EVERY, local=local)
    for step in state.steps(batches):
        with step:
            x, y = step.batch
            damage(step.index)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(wrapper(x), y)
            damage(step.index + 0.3)
            loss.backward()
            damage(step.index + 0.6)
            optimizer.step()
    tensors = [*model.parameters(), model.average]
    bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()
    if rank == 0:
        found = [each for each in reports if "the ranks differ" in each]
        print(json.dumps({"bits": bits, "made": made, "reports": found}), flush=True)


def cost_main() -> None:
    """Measure steps with and without comparisons, in turn. Rank 0 prints the times of the rounds in seconds."""
    import torch

    import allranks as dist
    from allranks.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    torch.set_num_threads(1)
    batch, times = torch.randn(64, 784), {"checked": [], "unchecked": []}

    def train(**options: Any) -> float:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
        model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)), **options)
        optimizer = torch.optim.AdamW(model.parameters())
        begin = time.perf_counter()
        for _ in range(COST_STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - begin) / COST_STEPS

    train(check_every=0)
    for _ in range(COST_ROUNDS):
        times["checked"].append(train(check_every=1))
        times["unchecked"].append(train(check_every=0))
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)


def run(*args: object, ranks: int = RANKS) -> Any:
    command = [sys.executable, "-m", "allranks", "run", "-n", str(ranks), "--show", "0", __file__, *map(str, args)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    return json.loads(found.stdout.splitlines()[-1].removeprefix("[0] "))


def judge(run: Any) -> tuple[int, int]:
    """Return the number of flips that were reported, and how many of these reports name the element and the rank."""
    reported = located = 0
    for report in run["reports"]:
        reported += 1
        first = re.search(r"differ at step \d+: (.*?)\. All ranks return", report, re.DOTALL)
        text = first[1] if first else ""
        located += any(f"{index} is " in text and f"on rank {victim}" in text for victim, _, index in run["made"])
    return reported, located


def flip_bits(flips: int) -> dict[str, Any]:
    checked = run("check", flips, 1)
    print(f"check_replicas: {checked['located']} of {checked['flips']} flips located", flush=True)
    undisturbed = run("train", STEPS_PER_RUN, 0)["bits"]
    total = reported = located = equal = runs = 0
    while total < flips:
        runs += 1
        found = run("train", STEPS_PER_RUN, runs)
        total += len(found["made"])
        more = judge(found)
        reported, located = reported + more[0], located + more[1]
        equal += found["bits"] == undisturbed
        text = f"{total} flips, {reported} reported, {located} located; {equal} of {runs} runs undisturbed"
        print(f"State: {text}", flush=True)
    state = {"flips": total, "reported": reported, "located": located, "runs": runs, "undisturbed": equal}
    return {"check_replicas": checked, "State": state}


def measure_cost() -> dict[str, Any]:
    times = run("cost", ranks=2)
    pairs = list(zip(times["checked"], times["unchecked"], strict=True))
    share = statistics.median((checked - unchecked) / unchecked for checked, unchecked in pairs)
    step_s = statistics.median(times["unchecked"])
    print(f"DistributedDataParallel: a step takes {step_s * 1e3:.2f} ms; a comparison adds {share:.1%} of a step")
    return {"step_ms": step_s * 1e3, "share": share, "rounds": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--flips", type=int, default=1000, help="number of flips in each part (1000)")
    parser.add_argument("--cost", action="store_true", help="measure the cost instead")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.part:
        name, *numbers = args.part
        {"check": check_main, "train": train_main, "cost": cost_main}[name](*map(int, numbers))
        return
    results = measure_cost() if args.cost else flip_bits(args.flips)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
