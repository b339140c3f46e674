"""Assemble the source of a random training program: ordinary PyTorch code under ``allranks.resilience.State``.

The result must read like a user's program, because an engineer reads it if it fails. The same pieces
(random_programs_pieces.py) become a script, a main function, several functions, or a Trainer class. One of the
candidates for the kill becomes a call of ``die()``, the others are removed.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, fields

from random_programs_choices import Choices, choose
from random_programs_pieces import GROUPS, PIECES, Draft, format_call, indent, split_lines

__all__ = ["Choices", "Program", "choose", "write"]


@dataclass
class Program:
    """A generated program.

    Attributes:
        choices: its dimensions.
        text: its source.
        place: the place of the call of die().
    """

    choices: Choices
    text: str
    place: str


def write(choices: Choices) -> Program:
    """Write a program."""
    draft = Draft(random.Random(f"text {choices.seed}"), choices)
    for piece in PIECES:
        if piece in GROUPS and draft.setup[-1]:
            draft.setup.append("")
        piece(draft)
    text = _render(draft)
    places = sorted(set(re.findall(r"<die: ([\w ]+)>", text)))
    rare = {"before State", "before the loop", "after the step", "epoch begin", "epoch end"}
    weights = [0.25 if place in rare else 1.0 for place in places]
    place = draft.rng.choices(places, weights)[0]
    text = text.replace("<die: in backward>", "output.register_hook(die)" if place == "in backward" else "<die: >")
    text = text.replace(f"<die: {place}>", "die()")
    text = re.sub(r"^ *<die: .*>\n", "", text, flags=re.M)
    text = re.sub(r"\n\n\n+", "\n\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M))
    return Program(choices, text, place)


# --- the whole text ---


def source_of(c: Choices) -> str:
    return {"number": str(c.steps), "list": "$batches"}.get(c.loader, "$loader")


def _training(d: Draft) -> list[str]:
    """Return the lines of one epoch of training."""
    steps = f"$state.steps({source_of(d.choices)})"
    loop = {
        "progress_loop": f"for step in Progress({steps}):",
        "enumerate": f"for number, step in enumerate({steps}):",
    }.get(d.choices.logging, f"for step in {steps}:")
    return [
        *d.begin,
        loop,
        "    with step:",
        *indent(d.step, 2),
        *indent(d.after_step),
        *d.end,
    ]


def _render(d: Draft) -> str:
    c = d.choices
    d.imports |= {"from random_programs_harness import die, report"}
    final = split_lines(format_call(d.choices, "report", [f"{name}={value}" for name, value in d.final.items()]))
    body = {"script": _script, "main": _main, "functions": _functions, "trainer": _trainer}[c.style](d, final)
    head = [f'"""{_summary(c)}"""', "", *_import_lines(d.imports)]
    text = "\n".join([*head, *_spaced(d.definitions), *body]) + "\n"
    return re.sub(r"\$(\w+)", r"self.\1" if c.style == "trainer" else r"\1", text)


def _spaced(definitions: list[str]) -> list[str]:
    """Return the definitions, each after two empty lines."""
    text = "\n".join(line for line in definitions if line.strip())
    lines: list[str] = []
    for line in text.splitlines():
        if re.match(r"(class|def) ", line) or (line[:1].strip() and not line.startswith((" ", "#"))):
            lines += ["", ""]
        elif re.match(r"    def ", line) and lines and not lines[-1].startswith("class "):
            lines += [""]
        lines.append(line)
    return lines


def _import_lines(imports: set[str]) -> list[str]:
    standard = ("collections", "contextlib", "copy", "random")
    mine = "random_programs_harness"
    ours = [line for line in imports if mine in line]
    python = [line for line in imports if line.split()[1].split(".")[0] in standard and line not in ours]
    others = sorted(imports - set(python) - set(ours), key=lambda line: (line.startswith("from"), line))
    python = sorted(python, key=lambda line: (line.startswith("from"), line))
    return [*python, *([""] if python else []), *others, "", *ours]


def _summary(c: Choices) -> str:
    values = []
    for each in fields(c):
        value = getattr(c, each.name)
        if each.name not in ("seed",) and value not in ("none", False):
            values.append(each.name if value is True else f"{each.name} {value}")
    text = textwrap.fill(", ".join(values) + ".", 110)
    return f"Random program {c.seed}.\n\n{text}\n"


def _loop(d: Draft, training: list[str], evaluation: list[str]) -> list[str]:
    """Return the loop over epochs around the lines of an epoch."""
    c = d.choices
    inside = [*training, *evaluation, *d.after_evaluation]
    if c.loop == "steps_only":
        return [*training, *evaluation]
    if c.loop == "two_loops":
        lowers = c.scheduler == "none"
        lower = ["if last > 1:", "    for group in $optimizer.param_groups:", '        group["lr"] = 0.01']
        return [
            "# Two phases, the second one with a lower learning rate." if lowers else "# Two phases.",
            f"for last in (1, {c.epochs}):",
            *(indent(lower) if lowers else []),
            "    for epoch in $state.epochs(last):",
            *indent(inside, 2),
        ]
    return [f"for epoch in $state.epochs({c.epochs}):", *indent(inside)]


def _script(d: Draft, final: list[str]) -> list[str]:
    empty = ["", ""] if d.definitions else [""]
    return [*empty, *d.setup, "", "<die: before the loop>", *_loop(d, _training(d), d.evaluation), *final]


def _main(d: Draft, final: list[str]) -> list[str]:
    inside = [*d.setup, "", "<die: before the loop>", *_loop(d, _training(d), d.evaluation), *final]
    return ["", "", "def main():", *indent(inside), "", "", 'if __name__ == "__main__":', "    main()"]


def _names(lines: list[str]) -> list[str]:
    return sorted(set(re.findall(r"\$(\w+)", "\n".join(lines))))


def _functions(d: Draft, final: list[str]) -> list[str]:
    training = _training(d)
    has_epoch = d.choices.loop != "steps_only"
    names = _names(training) + (["epoch"] if has_epoch else [])
    # A number that the function changes is returned.
    changed = ["$global_step"] if d.choices.global_step == "variable" else []
    training += [f"return {name}" for name in changed]
    called = format_call(d.choices, f"{changed[0]} = train" if changed else "train", names)
    text = ["", "", *split_lines(format_call(d.choices, "def train", names) + ":"), *indent(training)]
    evaluate: list[str] = []
    if d.evaluation:
        call = f"evaluate({', '.join(_names(d.evaluation))})"
        text += ["", "", f"def {call}:", *indent(d.evaluation)]
        evaluate = [call]
    inside = [*d.setup, "", "<die: before the loop>", *_loop(d, split_lines(called), evaluate), *final]
    return [*text, "", "", "def main():", *indent(inside), "", "", 'if __name__ == "__main__":', "    main()"]


def _trainer(d: Draft, final: list[str]) -> list[str]:
    epoch = ", epoch" if d.choices.loop != "steps_only" else ""
    train = f"self.train_epoch({epoch[2:]})"
    text = ["", "", "class Trainer:", "    def __init__(self):", *indent(d.setup, 2)]
    text += ["", f"    def train_epoch(self{epoch}):", *indent(_training(d), 2)]
    if d.evaluation:
        text += ["", "    def evaluate(self):", *indent(d.evaluation, 2)]
    evaluate = ["self.evaluate()"] if d.evaluation else []
    text += ["", "    def fit(self):", *indent(["<die: before the loop>", *_loop(d, [train], evaluate), *final], 2)]
    return [*text, "", "", 'if __name__ == "__main__":', "    Trainer().fit()"]
