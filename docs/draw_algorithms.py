"""Draw the diagrams of docs/algorithms.md, which show how the bytes of a call move.

python docs/draw_algorithms.py            # writes docs/algorithms-*.svg
python docs/draw_algorithms.py --check    # fails if one of them differs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, MARGIN = 640, 20
STYLE = """
  text { font: 13px 'DejaVu Sans', Verdana, Arial, sans-serif; fill: #1c2733; text-anchor: middle; }
  .note { font-size: 12px; }
  .paper { fill: #ffffff; stroke: #b6c0ca; }
  .a { fill: #d8e8fa; stroke: #4a7fb5; } .b { fill: #dcf0df; stroke: #4f9560; }
  .c { fill: #fbe7cf; stroke: #b9803a; } .d { fill: #f3dcec; stroke: #a35a8c; }
  .all { fill: #eceff2; stroke: #1c2733; }
  .arrow { fill: none; stroke: #56636f; stroke-width: 1.3; marker-end: url(#head); }
"""
COLOURS = "abcd"


def box(x: float, y: float, width: float, text: str, kind: str, height: float = 26) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
    yield f'<text x="{x + width / 2:g}" y="{y + height / 2 + 5:g}">{escape(text)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="arrow" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>'


def note(x: float, y: float, text: str) -> str:
    return f'<text class="note" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def columns(count: int) -> list[float]:
    """Return the centers of ``count`` columns."""
    room = (WIDTH - 2 * MARGIN) / count
    return [MARGIN + room * (i + 0.5) for i in range(count)]


def one_shot() -> Iterator[str]:
    yield "170"
    yield note(WIDTH / 2, 22, "every rank writes its operand to shared memory and reduces the operands of all ranks")
    for rank, x in enumerate(columns(4)):
        yield from box(x - 45, 36, 90, f"rank {rank}: n", COLOURS[rank])
        yield from box(x - 45, 128, 90, "0+1+2+3", "all")
        for other in columns(4):
            yield arrow(x, 62, other + (x - WIDTH / 2) / 12, 126)


def two_shot() -> Iterator[str]:
    yield "236"
    yield note(WIDTH / 2, 22, "1. each operand is cut into a shard for each rank; rank r reduces shard r of all")
    middles = columns(4)
    for rank, x in enumerate(middles):
        for shard in range(4):
            yield from box(x - 56 + 28 * shard, 34, 28, str(shard), COLOURS[shard])
        yield from box(x - 56 + 28 * rank, 110, 28, str(rank), COLOURS[rank])
        for other in middles:
            yield arrow(other - 42 + 28 * rank, 60, x - 42 + 28 * rank, 108)
    yield note(
        WIDTH / 2, 160, "2. every rank copies the shards that others have reduced; chunks of a large operand overlap"
    )
    for x in middles:
        for shard in range(4):
            yield from box(x - 56 + 28 * shard, 190, 28, str(shard), COLOURS[shard])
    yield arrow(WIDTH / 2, 166, WIDTH / 2, 186)


def levels() -> Iterator[str]:
    yield "226"
    yield note(WIDTH / 2, 22, "many ranks of a host: groups that share a cache or a node; the first rank of each leads")
    small, leaders = columns(8), columns(8)[::4]
    for rank, x in enumerate(small):
        kind = COLOURS[rank // 4]
        yield from box(x - 30, 36, 60, f"rank {rank}", kind)
        yield from box(x - 30, 184, 60, f"rank {rank}", kind)
        lead = leaders[rank // 4]
        if x != lead:
            yield arrow(x, 62, lead + 18, 102)
            yield arrow(lead + 18, 132, x, 182)
        else:
            yield arrow(x, 62, x, 102)
            yield arrow(x, 132, x, 182)
    for rank, x in zip((0, 4), leaders, strict=True):
        yield from box(x - 30, 104, 60, f"rank {rank}", COLOURS[rank // 4])
    yield arrow(leaders[0] + 30, 112, leaders[1] - 32, 112)
    yield arrow(leaders[1] - 30, 124, leaders[0] + 32, 124)
    yield note(WIDTH / 2 - 75, 106, "leaders exchange")


def hosts() -> Iterator[str]:
    yield "246"
    yield note(WIDTH / 2, 22, "1. within each host in shared memory: rank r reduces share r of the host's operands")
    spots = columns(4)
    names = [("node0", 0), ("node0", 1), ("node1", 0), ("node1", 1)]
    for x, (host, rank) in zip(spots, names, strict=True):
        yield from box(x - 55, 36, 110, f"{host}: share {rank}", COLOURS[rank])
    yield note(WIDTH / 2, 92, "2. between hosts over TCP: rank r of each host reduces share r of all hosts")
    for x, (_, rank) in zip(spots, names, strict=True):
        yield from box(x - 55, 140, 110, f"share {rank}", COLOURS[rank])
    for rank in (0, 1):
        left, right, y = spots[rank], spots[rank + 2], 120 - 12 * rank
        yield f'<path class="arrow" marker-start="url(#head)" d="M{left:g} 136 V{y} H{right:g} V136"/>'
    yield note(WIDTH / 2, 190, "3. within each host: every rank copies the shares of the others")
    for x in spots:
        yield from box(x - 55, 204, 110, "the sum", "all")


def chain() -> Iterator[str]:
    yield "170"
    yield note(WIDTH / 2, 22, "more than 8 hosts: each adds its operand to a segment and forwards it; the sum returns")
    spots, sums = columns(4), ["0", "0+1", "0+1+2", "0+1+2+3"]
    for host, x in enumerate(spots):
        yield from box(x - 45, 52, 90, f"host {host}", COLOURS[host])
        yield from box(x - 45, 78, 90, sums[host], COLOURS[host])
        if host:
            yield arrow(spots[host - 1] + 45, 70, x - 47, 70)
            yield arrow(x - 45, 88, spots[host - 1] + 47, 88)
    yield note(WIDTH / 2, 140, "all connections are busy: the next segment follows while the previous one is forwarded")


PICTURES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "one-shot": ("all_reduce of small tensors within a host", one_shot),
    "two-shot": ("all_reduce of large tensors within a host", two_shot),
    "levels": ("synchronization of many ranks of a host", levels),
    "hosts": ("all_reduce between hosts", hosts),
    "chain": ("all_reduce between many hosts", chain),
}


def draw(name: str) -> str:
    """Return a diagram."""
    title, shapes = PICTURES[name]
    height, *lines = shapes()
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#56636f"/></marker></defs>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
            f' width="{WIDTH}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            head,
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{float(height) - 1:g}" rx="8"/>',
            *lines,
            "</svg>\n",
        ]
    )


def costs() -> str:
    """Return the table of the costs in the file header ("Cost:") of each algorithm."""
    rows = []
    for path in sorted((FOLDER.parent / "core/collective/algorithms").glob("*.cc")):
        head = path.read_text().partition("#include")[0]
        text = " ".join(line.removeprefix("//").strip() or "\n" for line in head.splitlines())
        for part in re.split(r"\n|(?=one-shot  )|(?=two-shot  )|(?=in place  )", text):
            name, cost = part.strip().partition("  ")[0], part.partition("Cost: ")[2].strip()
            if cost:
                rows.append(f"| `{path.stem}`{', ' + name if '  ' in part.strip() else ''} | {cost} |")
    return "\n".join(["| file | cost |", "|---|---|", *rows])


def filled(page: str) -> str:
    """Return the page on algorithms with this table."""
    return re.sub("(?<=<!-- costs -->\n).*(?=\n<!-- /costs -->)", lambda _: costs(), page, flags=re.DOTALL)


def main(check: bool) -> None:
    """Write or compare all files."""
    page = FOLDER / "algorithms.md"
    files = {FOLDER / f"algorithms-{name}.svg": draw(name) for name in PICTURES} | {page: filled(page.read_text())}
    for path, text in files.items():
        if not check:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path.name} is outdated: run python docs/draw_algorithms.py")


if __name__ == "__main__":
    main("--check" in sys.argv)
