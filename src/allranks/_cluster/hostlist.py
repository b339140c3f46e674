"""Lists of hosts in the formats of schedulers and users: text in, names and counts out.

The tools that expand such lists (scontrol, ...) may be missing, for example in a container. ``_cluster.context`` and
the launcher decide what a list contains and which of these formats it has.

Source: SLURM's "HOSTLIST EXPRESSIONS" (scontrol(1)), Open MPI's and MPICH's host files, PBS' PBS_NODEFILE
(pbs_resources(7)), LSF's LSB_MCPU_HOSTS, SGE's PE_HOSTFILE (sge_pe(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from allranks._base.errors import ConfigError

__all__ = [
    "Slots",
    "count_lines",
    "expand_counts",
    "expand_hosts",
    "expand_numbers",
    "parse_hostfile",
    "parse_hosts",
    "parse_pairs",
    "parse_pe_hostfile",
]

# The most hosts, tasks or ports of one list. No cluster has more, and the limit keeps a typing error from filling the
# memory.
_MOST = 1 << 20
# A name may begin with user@ (as for ssh), and an IPv6 address is in brackets.
_NAME = re.compile(r"[\w.@%-]+|(?:[\w.-]+@)?\[[0-9A-Fa-f:.%\w]+\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_SLOTS = re.compile(r"(max[_-])?slots\s*=\s*(\d+)")


@dataclass(frozen=True)
class Slots:
    """A host, and the number of processes intended for it.

    Attributes:
        name: Name or address of the host.
        count: Number of processes. None if the list does not give it.
    """

    name: str
    count: int | None = None

    def __str__(self) -> str:
        return self.name if self.count is None else f"{self.name}:{self.count}"


def expand_hosts(text: str, source: str) -> list[str]:
    """Expand a SLURM list: ``a[01-03,07],gpu-[1-2]n[5-6]``.

    Args:
        text: The list.
        source: Origin of the text, for the error message.

    Raises:
        ConfigError: The text is not such a list.
    """
    names: list[str] = []
    for item in _split(text, source):
        for name in _expand(item, text, source):
            names.append(_checked(name, text, source))
            _limit(len(names), source)
    return names


def expand_counts(text: str, source: str) -> list[int]:
    """Expand SLURM's numbers of tasks per node: ``2(x2),1`` yields 2, 2 and 1.

    Raises:
        ConfigError: The text is not such a list.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"{source}={text!r}: {item!r} is not a number of tasks. Expected a list such as 2(x2),1.")
        times = int(match[2] or 1)
        _limit(len(counts) + times, source)
        counts += [int(match[1])] * times
    return counts


def expand_numbers(text: str, source: str) -> list[int]:
    """Expand ranges of numbers: ``20000-20002,20007``.

    Raises:
        ConfigError: The text is not such a list.
    """
    return [int(number) for number in _numbers(text.strip().removeprefix("[").removesuffix("]"), text, source)]


def parse_hosts(text: str, source: str) -> tuple[Slots, ...]:
    """Parse a list as in ``--hosts``: names or SLURM's ranges, each optionally with ``:slots``.

    Raises:
        ConfigError: The text is not such a list.
    """
    found = []
    for item in _split(text, source):
        names, count = _split_count(item, text, source)
        found += [Slots(name, count) for name in ([names] if _NAME.fullmatch(names) else expand_hosts(names, source))]
    return _merged(found)


def parse_hostfile(text: str, source: str) -> tuple[Slots, ...]:
    """Parse a host file: one host per line, as ``h``, ``h:4``, ``h slots=4`` or ``h 4``; ``#`` begins a comment.

    If a host is in several lines, their numbers are added, and a line without a number counts as one slot.

    Raises:
        ConfigError: A line has none of these formats, or the file names no host.
    """
    found: list[Slots] = []
    for where, line in _lines(text, source):
        first, *rest = line.split(None, 1)
        names, count = _split_count(first, line, where)
        words = rest[0].strip() if rest else ""
        if words.isdecimal() and count is None:
            count, words = int(words), ""
        for match in _SLOTS.finditer(words):
            if match[1] is None:  # max_slots limits how far mpirun may oversubscribe the host; it requests no slots
                count = int(match[2])
        if left := _SLOTS.sub("", words).strip():
            raise ConfigError(f"{where}: {left!r} is not known. Expected a host and its slots, such as: node0 slots=4")
        found += [Slots(name, count) for name in ([names] if _NAME.fullmatch(names) else expand_hosts(names, where))]
    return _some(_merged(found), source)


def count_lines(text: str, source: str) -> tuple[Slots, ...]:
    """Parse a file in which each line is one slot, as PBS and LSF write it.

    Raises:
        ConfigError: A line is not a host name, or the file names no host.
    """
    return _some(_summed(Slots(_checked(line, line, where), 1) for where, line in _lines(text, source)), source)


def parse_pairs(text: str, source: str) -> tuple[Slots, ...]:
    """Parse LSF's alternating names and numbers: ``h 4 h2 4``.

    Raises:
        ConfigError: The text is not such a list.
    """
    words = text.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(count.isdecimal() for count in counts):
        raise ConfigError(
            f"{source}={text!r} is not a list of hosts and numbers. Expected one such as: node0 4 node1 4"
        )
    pairs = zip(names, counts, strict=True)
    return _some(_summed(Slots(_checked(name, text, source), int(count)) for name, count in pairs), source)


def parse_pe_hostfile(text: str, source: str) -> tuple[Slots, ...]:
    """Parse SGE's file: host, slots, queue and processors in each line.

    Raises:
        ConfigError: A line has another format, or the file names no host.
    """
    found = []
    for where, line in _lines(text, source):
        name, *rest = line.split()
        if not rest or not rest[0].isdecimal():
            raise ConfigError(f"{where}: {line!r} is not a host and its slots. Expected: node0 4 all.q@node0 UNDEFINED")
        found.append(Slots(_checked(name, line, where), int(rest[0])))
    return _some(_summed(found), source)


def _split(text: str, source: str) -> list[str]:
    """Split the text at the commas that are outside brackets."""
    items, depth = [""], 0
    for letter in text.strip():
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _not_hosts(text, source, "its brackets do not match")
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise _not_hosts(text, source, "its brackets do not match")
    items = [item.strip() for item in items]
    if not all(items):
        raise _not_hosts(text, source, "a name is missing")
    return items


def _expand(item: str, text: str, source: str) -> Iterable[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inner, _, after = rest.partition("]")
    numbers, tails = _numbers(inner, text, source), list(_expand(after, text, source))
    # Before the product is built, because two short ranges can have a huge product.
    _limit(len(numbers) * len(tails), source)
    return [before + number + tail for number in numbers for tail in tails]


def _numbers(inner: str, text: str, source: str) -> list[str]:
    found: list[str] = []
    for span in inner.split(","):
        match = _RANGE.fullmatch(span.strip())
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(high) < int(low):
            raise ConfigError(f"{source}={text!r}: {span!r} is not a range of numbers. Expected one such as 01-03.")
        # Before the range is expanded, for the same reason.
        _limit(len(found) + int(high) - int(low) + 1, source)
        found += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
    return found


def _split_count(item: str, text: str, source: str) -> tuple[str, int | None]:
    names, colon, count = item.rpartition(":")
    if not colon or item.endswith("]") or (":" in names and not names.endswith("]")):  # the last: a bare IPv6 address
        return (f"[{item}]" if colon and not item.endswith("]") else item), None
    if not count.isdecimal():
        raise _not_hosts(text, source, f"{count!r} is not a number of slots")
    return names, int(count)


def _checked(name: str, text: str, source: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("-"):  # ssh would parse such a name as an option
        raise _not_hosts(text, source, f"{name!r} is not a host name")
    return name


def _lines(text: str, source: str) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if entry := line.partition("#")[0].strip():
            yield f"{source}, line {number}", entry


def _merged(found: list[Slots]) -> tuple[Slots, ...]:
    """Return one entry per host. If a host is listed twice, each entry without a number counts as one slot."""
    found = [Slots(_checked(s.name, s.name, "the list of hosts").strip("[]"), s.count) for s in found]
    counted = len({slots.name for slots in found}) < len(found)
    return _summed(Slots(s.name, 1 if s.count is None and counted else s.count) for s in found)


def _summed(found: Iterable[Slots]) -> tuple[Slots, ...]:
    counts: dict[str, int | None] = {}
    for slots in found:
        counts[slots.name] = slots.count if slots.name not in counts else (counts[slots.name] or 0) + (slots.count or 0)
    return tuple(Slots(name, count) for name, count in counts.items())


def _some(found: tuple[Slots, ...], source: str) -> tuple[Slots, ...]:
    if not found:
        raise ConfigError(f"{source} names no host. Expected at least one.")
    return found


def _limit(count: int, source: str) -> None:
    if count > _MOST:
        raise ConfigError(f"{source} names more than {_MOST} hosts.")


def _not_hosts(text: str, source: str, why: str) -> ConfigError:
    return ConfigError(
        f"{source}={text!r} is not a list of hosts: {why}. Expected one such as node0:2,node1 or node[01-03,07]."
    )
