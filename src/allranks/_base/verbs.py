"""The table of collectives and messages, from which lists, traces, plans and benchmarks derive their facts.

A new collective has one entry here. Its signature and documentation are in ``_api/collectives.py``, its checks in
``_group/communicator.py``, and its algorithm in ``core/``. docs/extending.md lists all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMAND", "MESSAGES", "REDUCING", "VERBS", "Verb", "names"]


@dataclass(frozen=True)
class Verb:
    """One collective, or one side of a message.

    Attributes:
        name: The name in the public API, in the core and in traces.
        given: Chunks of a rank's input: 1; 0 for one per rank; -1 for none.
        results: Chunks of a rank's output, in the same encoding.
        in_place: Input and output are one tensor.
        reduces: It takes a reduce op.
        root: The role of the root: "src" (it has the input), "dst" (it gets the result), or "" if there is none.
        waits: It returns on no rank before all ranks have begun it, with any algorithm and engine.
        alike: The result is equal on all ranks.
        planned: ``ProcessGroup.plan`` can prepare it.
        color: Its color in pictures: dark enough for white text, and distinguishable by lightness, too.
    """

    name: str
    given: int
    results: int
    color: str
    in_place: bool = False
    reduces: bool = False
    root: str = ""
    waits: bool = False
    alike: bool = False
    planned: bool = True


VERBS = {
    verb.name: verb
    for verb in (  # in the order of the core's codes (core/base/types.h), which begin at 1
        Verb("all_reduce", 1, 1, "#2563a8", in_place=True, reduces=True, waits=True, alike=True),
        Verb("reduce", 1, 1, "#6b4fa0", in_place=True, reduces=True, root="dst"),
        Verb("broadcast", 1, 1, "#0f7b6c", in_place=True, root="src", alike=True),
        Verb("all_gather", 1, 0, "#c05a1c", waits=True, alike=True),
        Verb("gather", 1, 0, "#94701a", root="dst"),
        Verb("scatter", 0, 1, "#a0527c", root="src"),
        Verb("reduce_scatter", 0, 1, "#7a4a35", reduces=True, waits=True),
        Verb("all_to_all", 0, 0, "#b3343f"),
        Verb("barrier", -1, -1, "#5b6673", waits=True, alike=True),
        Verb("send", 1, -1, "#3f7d3a", planned=False),
        Verb("recv", -1, 1, "#6f9a2e", planned=False),
    )
}


def names(**facts: object) -> tuple[str, ...]:
    """Return the names of all verbs for which each of these attributes has this value."""
    return tuple(v.name for v in VERBS.values() if all(getattr(v, key) == value for key, value in facts.items()))


COMMAND = "command"
"""The name of worker commands in traces. They use code 0, which no verb uses."""

MESSAGES = ("send", "recv")
REDUCING = names(reduces=True)
