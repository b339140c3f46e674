"""Whether a machine is quiet enough for figures: who else uses its CPUs, before and while something is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["READING", "Conditions", "Window", "before", "judge"]

_USER, _IDLE, _IOWAIT, _STEAL, _GUEST = 0, 3, 4, 7, 8  # columns of /proc/stat
_BUSY = 0.1  # of the CPUs, by others
_LOADED = 0.25  # of the CPUs, in the last minute
_STOLEN = 0.02
_WAITED = 0.05
_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")

READING = "medians are of a machine that others use, too; fastest blocks are nearer to a quiet one's"
"""How figures read that were measured where it is not quiet."""


@dataclass(frozen=True)
class Conditions:
    """How much others do on this host.

    Attributes:
        cpus: those that this process may use.
        load: processes that ran or waited, on the whole host, in the last minute before.
        waited: the share of that minute in which one of them had to wait for a CPU; None where that is not known.
        governor: how the CPUs' frequency is chosen; "" where that is not shown.
        busy: how many of the CPUs others kept busy while it was measured; None before.
        steal: the share of the CPUs' time that the hypervisor gave to others; None before.
    """

    cpus: int
    load: float
    waited: float | None
    governor: str
    busy: float | None = None
    steal: float | None = None


def before() -> Conditions:
    """What is known before anything is measured."""
    pressure, governor = Path("/proc/pressure/cpu"), _CPUFREQ / "scaling_governor"
    waited = None
    try:  # a kernel may have the file and refuse to read it
        some = dict(part.split("=") for part in pressure.read_text().splitlines()[0].split()[1:])
        waited = float(some["avg60"]) / 100
    except OSError:
        pass
    return Conditions(
        cpus=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        waited=waited,
        governor=governor.read_text().strip() if governor.exists() else "",
    )


class Window:
    """From here on it is measured."""

    def __init__(self) -> None:
        self._before = before()
        self._cpus = os.sched_getaffinity(0)
        self._began = time.monotonic()
        self._ticks = _ticks(self._cpus)

    def end(self, own_s: float) -> Conditions:
        """What others did since.

        Args:
            own_s: processor time, in seconds, of those who measured.
        """
        took = max(time.monotonic() - self._began, 1e-9)
        busy, steal, total = (after - start for after, start in zip(_ticks(self._cpus), self._ticks, strict=True))
        others_s = busy / os.sysconf("SC_CLK_TCK") - own_s
        known = self._before
        return Conditions(
            known.cpus, known.load, known.waited, known.governor, max(0.0, others_s / took), steal / max(total, 1)
        )


def judge(found: Conditions) -> list[str]:
    """Why it is not quiet; empty where it is."""
    why = []
    if found.busy is None:
        if found.load > _LOADED * found.cpus:
            why.append(f"load {found.load:.1f} in the last minute, on {found.cpus} CPUs")
        if found.waited is not None and found.waited > _WAITED:
            why.append(f"processes waited for a CPU in {found.waited:.0%} of it")
    elif found.busy > _BUSY * found.cpus:
        why.append(f"other processes kept {found.busy:.1f} of {found.cpus} CPUs busy")
    if found.steal is not None and found.steal > _STOLEN:
        why.append(f"the hypervisor took {found.steal:.0%} of the CPUs' time (steal)")
    if found.governor not in ("", "performance"):
        why.append(f"the CPUs' frequency changes with the load (governor {found.governor})")
    return why


def _ticks(cpus: Set[int]) -> tuple[int, int, int]:
    """Clock ticks of these CPUs since the host began: busy, stolen, all."""
    busy = steal = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            ticks = [int(word) for word in words[_USER:_GUEST]]  # a guest's are in the user's
            steal += ticks[_STEAL]
            total += sum(ticks)
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
    return busy, steal, total
