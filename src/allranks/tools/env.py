"""``allranks env``: how allranks interprets the environment of this process, and from which variables.

Use it if ranks do not find each other, or if a job runs on one node instead of four. It prints how a program and
``allranks run`` would interpret this environment. Start it in the same way as the program (``srun allranks env``). It
does not need torch. ``_cluster.detection`` finds the launcher or scheduler. The table of variables is in
``_cluster.env``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks._base.console import harmless, put
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import USAGE
from allranks._cluster.context import Clue, LaunchContext
from allranks._cluster.detection import CHOICES, command_for, detect
from allranks._cluster.env import VARIABLES
from allranks.launch.arguments.options import Parser
from allranks.launch.spec.values import environment_kind

__all__ = ["EnvReport", "collect", "main", "render"]

_SECRETS = ("ALLRANKS_SECRET", "ALLRANKS_STORE")  # a store's address gives access to the job
_WIDTH = 40  # maximum characters of a printed value
_MOST = 8  # maximum number of printed hosts


@dataclass(frozen=True)
class EnvReport:
    """The result of `collect`.

    Attributes:
        host: The name of this host.
        program: The context that a program would detect. None if detection fails.
        launcher: The context that ``allranks run`` would detect. None if detection fails.
        variables: The allranks and torch variables that are set, with their meaning.
        trouble: The errors.
    """

    host: str
    program: LaunchContext | None
    launcher: LaunchContext | None
    variables: tuple[Clue, ...]
    trouble: tuple[str, ...] = ()


def collect(environ: Mapping[str, str], override: str = "auto") -> EnvReport:
    """Examine an environment."""
    found: dict[bool, LaunchContext | None] = {}
    trouble: list[str] = []
    for launcher in (False, True):
        try:
            found[launcher] = detect(environ, override, launcher=launcher)
        except ConfigError as error:
            found[launcher] = None
            trouble.append(str(error))
    names = {variable.name: variable.meaning for variable in VARIABLES}
    variables = tuple(
        Clue(name, "(not shown)" if name in _SECRETS else environ[name], meaning)
        for name, meaning in names.items()
        if environ.get(name, "").strip()
    )
    return EnvReport(socket.gethostname(), found[False], found[True], variables, tuple(dict.fromkeys(trouble)))


def render(report: EnvReport) -> str:
    """Return the report as text."""
    lines = [f"On host {report.host}."]
    for title, place in (("A program here", report.program), ("allranks run here", report.launcher)):
        if place is not None:
            lines += ["", f"{title} {_summary(place, title.startswith('A '))}"]
            if place is report.program or place != report.program:  # print the facts once if both contexts are equal
                lines += [f"  {name:11}{text}" for name, text in _facts(place)]
    places = [place for place in (report.program, report.launcher) if place is not None]
    clues = list(dict.fromkeys(clue for place in places for clue in place.why))
    lines += _table("Because of:", clues)
    known = {clue.name for clue in clues}
    lines += _table("Also set:", [clue for clue in report.variables if clue.name not in known])
    lines += [line for place in places if place.hint for line in ("", f"Possibly a mistake: {place.hint}.")]
    lines += [line for text in report.trouble for line in ("", f"Error: {text}")]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``allranks env``.

    Args:
        argv: The arguments. None: the arguments of this process.

    Returns:
        The exit code: 2 if the environment is wrong.
    """
    parser = Parser(
        prog="allranks env",
        description="Show what started this process, and the variables that show it.",
        examples=(
            ("allranks env", "what allranks run would do here"),
            ("srun -N 2 allranks env", "what each rank of that job detects"),
        ),
    )
    parser.add_argument(
        "--env",
        type=environment_kind,
        metavar="KIND",
        default="auto",
        help=f"detect only this (same as ALLRANKS_ENV): {', '.join(CHOICES)}",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    try:
        options = parser.parse_args(argv)
    except ConfigError as error:
        print(harmless(f"{parser.prog}: error: {error}"), file=sys.stderr)
        return USAGE
    report = collect(os.environ, options.env)
    # Write the output in one call, because other ranks write to the same stream.
    put((json.dumps(dataclasses.asdict(report), indent=2) if options.json else render(report)) + "\n")
    return USAGE if report.trouble else 0


def _summary(place: LaunchContext, program: bool) -> str:
    if place.role == "rank" and not program:
        return f"runs it in place, as rank {place.rank} of {place.size} ({place.kind})"
    if place.role == "rank":
        return f"is rank {place.rank} of {place.size} ({place.kind})"
    if place.role == "node":
        nodes = f" of {place.nodes}" if place.nodes else ""
        return f"starts the ranks of this node, which is node {place.node}{nodes} ({place.kind})"
    if place.role == "allocation":
        nodes = f"on {place.nodes} nodes" if place.nodes else "on its nodes"
        return f"starts the ranks {nodes} of this allocation, by {command_for(place).name} ({place.kind})"
    return "runs alone, as rank 0 of 1" if program else "starts all ranks on this host"


def _facts(place: LaunchContext) -> list[tuple[str, str]]:
    """Return further known facts about a rank or about the nodes."""
    known = []
    if place.local_rank is not None:
        of = f" of {place.local_size}" if place.local_size else ""
        known.append(("local rank", f"{place.local_rank}{of}"))
    if place.role == "rank" and place.node is not None:
        known.append(("node", f"{place.node}{f' of {place.nodes}' if place.nodes else ''}"))
    if place.leader:
        known.append(("rank 0 on", place.leader))
    if place.hosts:
        more = f", and {len(place.hosts) - _MOST} more" if len(place.hosts) > _MOST else ""
        known.append(("hosts", ", ".join(map(str, place.hosts[:_MOST])) + more))
    elif place.hostfile:
        known.append(("hosts", f"in the file {place.hostfile.partition('=')[2]}"))
    return known


def _table(title: str, clues: Sequence[Clue]) -> list[str]:
    if not clues:
        return []
    cells = [
        f"{clue.name}={clue.value if len(clue.value) <= _WIDTH else clue.value[: _WIDTH - 3] + '...'}" for clue in clues
    ]
    width = max(map(len, cells))
    return ["", title, *(f"  {cell:{width}}  {clue.meaning}" for cell, clue in zip(cells, clues, strict=True))]
