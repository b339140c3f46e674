"""Measure a worker's calls as generated functions, and as closures over the same forms (docs/decisions/090).

    python benchmarks/worker_calls.py --json benchmarks/worker_calls.json

Each call has tensors of four elements, so that the operator itself costs little. A captured step is a chain of such
calls; in generated code its tensors are local variables of one function. Both ways take turns in one process, and the
medians of the blocks are compared.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from allranks.remote.protocol.arguments import GENERATOR, constant_of, form_of, visit
from allranks.remote.worker.generated import call_function, call_source, flatten, program_function

CPU = torch.device("cpu")
CALLS, STEPS = 2000, 64
aten = torch.ops.aten


class Getters:
    """Factory of functions that read an argument from the slots or from the values of a frame."""

    def __init__(self, inputs, outputs):
        self.first_number = inputs + outputs
        self.tensors = self.numbers = 0

    def tensor(self):
        self.tensors += 1
        return lambda slots, values, at=self.tensors - 1: slots[values[at]]

    def number(self, code):
        assert code != GENERATOR
        self.numbers += 1
        return lambda slots, values, at=self.first_number + self.numbers - 1: values[at]

    def sequence(self, parts):
        return lambda slots, values: [each(slots, values) for each in parts]

    def constant(self, form):
        value = constant_of(form, CPU)
        return lambda slots, values: value


def closure(op, args, kwargs, layout, inputs, outputs):
    """Return the equivalent of a generated function, without generated text."""
    op = op._op
    getters = Getters(inputs, outputs)
    given = [visit(each, getters) for each in args]
    named = [(name, visit(each, getters)) for name, each in kwargs.items()]
    unpack = layout.unpack_from

    def run_one(slots, buffer, at):
        values = unpack(buffer, at)
        slots[values[inputs]] = op(
            *[each(slots, values) for each in given], **{name: each(slots, values) for name, each in named}
        )

    def run_many(slots, buffer, at):
        values = unpack(buffer, at)
        result = op(*[each(slots, values) for each in given], **{name: each(slots, values) for name, each in named})
        slots.update(zip(values[inputs : inputs + outputs], flatten(result), strict=True))

    return run_one if outputs == 1 else run_many


def calls():
    """Return operator, arguments, keyword arguments and number of results of each call."""
    x, weight = torch.ones(4), torch.ones(4)
    return {
        "relu": (aten.relu.default, (x,), {}, 1),
        "add": (aten.add.Tensor, (x, x), {"alpha": 2}, 1),
        "addmm": (aten.addmm.default, (x[:2], x.view(2, 2), x.view(2, 2)), {"beta": 1, "alpha": 1}, 1),
        "layer_norm": (aten.native_layer_norm.default, (x, [4], weight, weight, 1e-5), {}, 3),
        "foreach_add": (aten._foreach_add.List, ([x, x], [x, x]), {}, 2),
    }


def both(number, op, args, kwargs, outputs):
    """Return a call as a generated function and as a closure, with slots and a frame."""
    forms = [form_of(each, False, False) for each in args]
    named = {name: form_of(each, True, False) for name, each in kwargs.items()}
    space = {"settle": None, "generators": {}}
    source = call_source(number, forms, named, [()] * outputs, op, CPU, space)
    tensors = [each for each in flatten([*args, *kwargs.values()]) if isinstance(each, torch.Tensor)]
    numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, int | float)]
    slots = dict(enumerate(tensors))
    layout = source.plain.layout
    frame = layout.pack(*range(source.inputs), *range(100, 100 + outputs), *numbers)
    generated = call_function(source.plain, source.inputs, outputs)
    return slots, frame, {"generated": generated, "closure": closure(op, forms, named, layout, source.inputs, outputs)}


def step():
    """Return a chain of additions as one generated function, and as a sequence of closures."""
    forms, named = [["t"], ["t"]], {"alpha": ["i"]}
    source = call_source(0, forms, named, [()], aten.add.Tensor, CPU, {"settle": None, "generators": {}})
    layout = source.plain.layout
    one = closure(aten.add.Tensor, forms, named, layout, 2, 1)
    frames = b"".join(layout.pack(each, 0, each + 1, 1) for each in range(STEPS))
    lines = [
        source.plain.text.format(i=[f"v{each}", "v0"], o=[f"v{each + 1}"], n=["1"]) + (f"; del v{each}" if each else "")
        for each in range(STEPS)
    ]
    whole = program_function([0], lines, f"v{STEPS},", dict(source.plain.space))

    def generated(slots, buffer, at):
        (slots[STEPS],) = whole(slots, slots[0])

    def closures(slots, buffer, at):
        for each in range(STEPS):
            one(slots, buffer, each * layout.size)
            if each:
                del slots[each]

    return {0: torch.ones(4)}, frames, {"generated": generated, "closure": closures}


def measure(blocks, ways, slots, frame, count):
    """Return the seconds of one call, by way: the median of blocks that take turns."""
    seconds = {name: [] for name in ways}
    for block in range(-1, blocks):
        for name, run in ways.items():
            began = time.perf_counter()
            for _ in range(count):
                run(slots, frame, 0)
            if block >= 0:  # earlier blocks warm up
                seconds[name].append((time.perf_counter() - began) / count)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found = {}
    for number, (name, call) in enumerate(calls().items()):
        slots, frame, ways = both(number, *call)
        found[name] = measure(options.blocks, ways, slots, frame, CALLS)
    slots, frame, ways = step()
    found[f"a captured step of {STEPS} additions"] = measure(options.blocks, ways, slots, frame, CALLS // STEPS)
    report = {
        "machine": platform.machine(),
        "median_s": found,
        "closure_over_generated": {name: each["closure"] / each["generated"] for name, each in found.items()},
    }
    for name, each in found.items():
        print(
            f"{name:34} generated {each['generated'] * 1e6:7.2f} us   closure {each['closure'] * 1e6:7.2f} us   "
            f"{each['closure'] / each['generated']:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
