"""Writes a timeline as one HTML file that draws itself without a network: ``page.html`` with the calls embedded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allranks._trace.chrome import name_of, slice_arguments
from allranks._trace.colours import COLOURS, pale
from allranks._trace.timeline import Timeline

__all__ = ["write"]

_TEMPLATE = Path(__file__).with_name("page.html")
_PLACE = "/* the timeline */ null"


def write(timeline: Timeline, file: Path) -> None:
    """Write the page.

    Raises:
        OSError: The file cannot be written.
    """
    # A call site may contain "</script>", which would end the data.
    data = json.dumps(_data(timeline), separators=(",", ":")).replace("</", "<\\/")
    file.write_text(_TEMPLATE.read_text().replace(_PLACE, data))


def _data(timeline: Timeline) -> dict[str, Any]:
    """Return all data that the page draws. Times are in ns.

    Texts are indices into one list, because most of them occur often.
    """
    texts: dict[str, int] = {}
    places = {process.number: place for place, process in enumerate(timeline.processes)}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    slices = []
    for each in timeline.slices:
        known = slice_arguments(each)
        known.pop("waited (us)", None)
        details = "\n".join(f"{name}: {value}" for name, value in known.items())
        times = [each.begin, each.end - each.begin, each.waited_until - each.begin]
        slices.append([each.row, each.lane, *times, text(each.title), text(each.call.verb), text(details)])
    error = timeline.error
    return {
        "processes": [name_of(timeline, process) for process in timeline.processes],
        "rows": [[places[row.process], row.title, row.lanes] for row in timeline.rows],
        "slices": slices,
        "arrows": [[a.kind == "message", a.source, a.source_ns, a.target, a.target_ns] for a in timeline.arrows],
        "texts": list(texts),
        "colours": {verb: [shade, pale(verb)] for verb, shade in COLOURS.items()},
        "late": [[late.rank, late.times, late.waited] for late in timeline.late],
        "compared": timeline.compared,
        "end": timeline.end,
        "host": timeline.clocks[0].host,
        "hosts": len(timeline.clocks),
        "error": error,
        "missing": timeline.missing,
        "calls": timeline.calls,
        "commands": timeline.commands,
        "zero_wall": timeline.zero_wall // 1_000_000,
    }
