"""Draw docs/rooms.svg, the diagram of docs/architecture.md.

The layers of the Python package come from the contract in .importlinter, those of the core from the table in
tests/house/test_core_rooms.py. The diagram therefore shows the layers that are checked. This file contains only the
descriptions in the boxes.

    python docs/draw.py            # writes the diagram
    python docs/draw.py --check    # fails if it is not up to date
"""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "rooms.svg"

WORDS = {
    "__main__": "the command allranks: finds the subcommand",
    "tools": "allranks bench, doctor, env, submit, trace, top",
    "nn": "gradients; torch.nn's names",
    "algorithms": "communication hooks",
    "parallel": "DDP",
    "testing": "run_ranks",
    "data": "samplers",
    "checkpoint": "save, load",
    "resilience": "public names of _elastic.training",
    "_elastic.training": "State: a training loop that survives lost ranks",
    "_elastic": "membership after a loss",
    "trace": "own calls",
    "logging": "log files",
    "_trace": "the record of calls and its readers",
    "_watch": "waits in torch's own backends",
    "schedulers": "an interface",
    "engines": "an interface",
    "remote": "master-worker mode: the device worker:N",
    "_plugin": "the backend of torch.distributed",
    "_api": "the functions that users call: all_reduce, init_process_group, new_group",
    "_group": "ProcessGroup: selects the engine",
    "_engines": "transfers of tensors: native, gloo, nccl, mpi",
    "launch": "allranks run, allranks.run",
    "multiprocessing": "spawn",
    "_call": "ReduceOp, Work, futures, call site",
    "_rendezvous": "how ranks find each other",
    "_store": "key-value stores: TCP, file, in memory",
    "_net": "handshake, admission of connections, frames, TLS",
    "_cluster": "launcher, scheduler, host, network, environment variables",
    "_base": "errors, forks, threads, console",
}
CORE_WORDS = {
    "python": "the binding: code that uses Python",
    "group": "one rank of one group",
    "remote": "workers",
    "collective": "collectives",
    "p2p": "messages",
    "trace": "calls",
    "channel": "memory, TCP",
    "base": "types, errors, waiting, Linux",
}

MIXED = ("_group", "_elastic")
"""Packages whose files use each other in both directions. The order of the files is checked."""

WIDTH, MARGIN, TOP = 1000, 20, 64
LEFT, RIGHT = (MARGIN, 640), (700, WIDTH - MARGIN)  # left and right edges of the two columns
BOX, GAP = 46, 8
NAME_PX, WORDS_PX = 14, 12
STYLE = """
  text { font-family: 'DejaVu Sans', Verdana, Arial, sans-serif; fill: #1c2733; }
  .name { font-size: 14px; font-weight: bold; text-anchor: middle; }
  .words { font-size: 12px; text-anchor: middle; }
  .title { font-size: 15px; font-weight: bold; }
  .note { font-size: 12px; }
  .paper { fill: #ffffff; stroke: #b6c0ca; }
  .public { fill: #d8e8fa; stroke: #4a7fb5; }
  .private { fill: #eceff2; stroke: #8794a1; }
  .core { fill: #dcf0df; stroke: #4f9560; }
  .arrow { fill: none; stroke: #1c2733; stroke-width: 1.5; marker-end: url(#head); }
"""


def package_layers() -> list[list[str]]:
    """Return the layers of the package, from top to bottom."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    layers: list[list[str]] = []
    for line in filter(None, map(str.strip, lines)):
        names = re.split(r"\s*[|:]\s*", line)
        # _group and _elastic are layered file by file, in one row. A package inside a package has a separate row.
        files = [
            name for name in names if "." in name and not (ROOT / "src/allranks" / name.replace(".", "/")).is_dir()
        ]
        rooms = [name.partition(".")[0] if name in files else name for name in names]
        if files and layers[-1] == list(MIXED):
            continue
        layers.append(list(MIXED) if files else rooms)
    return layers


def core_layers() -> list[list[str]]:
    """Return the layers of the core, from top to bottom, each as low as its includes permit."""
    below: dict[str, set[str]] = runpy.run_path(str(ROOT / "tests" / "house" / "test_core_rooms.py"))["BELOW"]
    height: dict[str, int] = {}
    for room in below:  # each is listed after the layers that it includes
        height[room] = 1 + max((height[other] for other in below[room]), default=-1)
    return [[room for room in below if height[room] == level] for level in range(max(height.values()), -1, -1)]


def text_width(text: str, size: int, bold: bool = False) -> float:
    """Return an upper estimate of the width of a text."""
    return len(text) * size * (0.68 if bold else 0.6)


def layer(names: list[str], words: dict[str, str], column: tuple[int, int], y: int, core: bool) -> Iterator[str]:
    """Return the boxes of one layer, side by side. Their widths follow from their words."""
    left, right = column
    least = [max(text_width(name, NAME_PX, True), text_width(words[name], WORDS_PX)) + 12 for name in names]
    room = right - left - GAP * (len(names) - 1)
    if sum(least) > room:
        raise SystemExit(f"docs/draw.py: the descriptions of {', '.join(names)} do not fit side by side. Shorten them")
    x = float(left)
    for name, need in zip(names, least, strict=True):
        width = need + (room - sum(least)) / len(names)
        kind = "core" if core else "private" if name.startswith("_") else "public"
        middle = x + width / 2
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="5"/>'
        yield f'<text class="name" x="{middle:.1f}" y="{y + 19}">{escape(name)}</text>'
        yield f'<text class="words" x="{middle:.1f}" y="{y + 36}">{escape(words[name])}</text>'
        x += width + GAP


def draw() -> str:
    """Return the diagram."""
    package, core = package_layers(), core_layers()
    for names, words in ((package, WORDS), (core, CORE_WORDS)):
        rooms = {name for each in names for name in each}
        if wrong := rooms ^ words.keys():
            raise SystemExit(f"docs/draw.py: the descriptions do not match the existing modules: {sorted(wrong)}")
    rows = {name: TOP + (BOX + GAP) * i for i, names in enumerate(package) for name in names}
    height = TOP + (BOX + GAP) * len(package) - GAP + MARGIN
    begin = rows["_engines"]  # the binding is beside its main user
    height = max(height, begin + (BOX + GAP) * len(core) - GAP + MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        "<title>The rooms of allranks: each uses only those below it</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#1c2733"/></marker></defs>',
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{LEFT[0]}" y="30">src/allranks (Python)</text>',
        f'<text class="note" x="{LEFT[0]}" y="50">A room imports only rooms below it.</text>',
    ]
    for names in package:
        lines += layer(names, WORDS, LEFT, rows[names[0]], core=False)
    for i, names in enumerate(core):
        lines += layer(names, CORE_WORDS, RIGHT, begin + (BOX + GAP) * i, core=True)
    lines += [
        f'<text class="title" x="{RIGHT[0]}" y="{begin - 30}">core (C++)</text>',
        f'<text class="note" x="{RIGHT[0]}" y="{begin - 10}">A room includes only rooms below it.</text>',
    ]
    for name, kind, words in (("public", "public", "users import it"), ("_private", "private", "only allranks does")):
        y = TOP if kind == "public" else TOP + 34
        lines += [
            f'<rect class="{kind}" x="{RIGHT[0]}" y="{y}" width="26" height="20" rx="4"/>',
            f'<text class="note" x="{RIGHT[0] + 36}" y="{y + 15}">{name}: {words}</text>',
        ]
    # The two main users of the core. The other users call only single functions of it.
    middle, corner = begin + BOX / 2, RIGHT[1] - 24
    lines += [
        f'<path class="arrow" d="M{LEFT[1]} {middle} H{RIGHT[0] - 2}"/>',
        f'<path class="arrow" d="M{LEFT[1]} {rows["remote"] + BOX / 2} H{corner} V{begin - 2}"/>',
        f'<text class="note" x="{RIGHT[0]}" y="{rows["remote"] + BOX + 6}">both import allranks._core</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    picture = draw()
    if "--check" not in sys.argv:
        PICTURE.write_text(picture)
    elif not PICTURE.exists() or PICTURE.read_text() != picture:
        raise SystemExit("docs/rooms.svg is outdated: run python docs/draw.py")


if __name__ == "__main__":
    main()
