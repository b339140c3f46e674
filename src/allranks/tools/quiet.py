"""Detects whether a machine is quiet enough for measurements.

It checks the CPU use of other processes before and during the measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["READING", "Conditions", "MeasurementWindow", "current_conditions", "noise_reasons"]

_USER, _IDLE, _IOWAIT, _STEAL, _GUEST = 0, 3, 4, 7, 8  # columns of /proc/stat
_BUSY = 0.1  # share of the CPUs that other processes use
_LOADED = 0.25  # load per CPU in the last minute
_STOLEN = 0.02  # share of the CPU time that the hypervisor took
_WAITED = 0.05  # share of the last minute in which a process waited for a CPU
_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")

READING = "other processes affect the medians; the fastest blocks are closer to those of a quiet machine"
"""How to interpret figures that were measured on a machine that is not quiet."""


@dataclass(frozen=True)
class Conditions:
    """CPU use of other processes on this host.

    Attributes:
        cpus: The number of CPUs that this process may use.
        load: Load average of the whole host over the minute before the measurement: processes that ran or waited.
        waited: Share of that minute in which a process had to wait for a CPU. None if it is not known.
        governor: The frequency governor of the CPUs. "" if the host does not report it.
        busy: The number of CPUs that other processes kept busy during the measurement. None before it.
        steal: Share of the CPU time that the hypervisor gave to other guests. None before the measurement.
    """

    cpus: int
    load: float
    waited: float | None
    governor: str
    busy: float | None = None
    steal: float | None = None


def current_conditions() -> Conditions:
    """Return the conditions that are known before a measurement."""
    pressure, governor = Path("/proc/pressure/cpu"), _CPUFREQ / "scaling_governor"
    waited = None
    try:  # a kernel may have the file but refuse to read it
        some = dict(part.split("=") for part in pressure.read_text().splitlines()[0].split()[1:])
        # avg60: percent of the last 60 s, as for the load average of one minute.
        waited = float(some["avg60"]) / 100
    except OSError:
        pass
    return Conditions(
        cpus=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        waited=waited,
        governor=governor.read_text().strip() if governor.exists() else "",
    )


class MeasurementWindow:
    """A measurement interval that starts when the object is created."""

    def __init__(self) -> None:
        self._before = current_conditions()
        self._cpus = os.sched_getaffinity(0)
        self._began = time.monotonic()
        self._ticks = _ticks(self._cpus)

    def end(self, own_s: float) -> Conditions:
        """Return the CPU use of other processes since the start.

        Args:
            own_s: CPU time of the measuring processes, in seconds.
        """
        took = max(time.monotonic() - self._began, 1e-9)
        busy, steal, total = (after - start for after, start in zip(_ticks(self._cpus), self._ticks, strict=True))
        others_s = busy / os.sysconf("SC_CLK_TCK") - own_s
        known = self._before
        return Conditions(
            known.cpus, known.load, known.waited, known.governor, max(0.0, others_s / took), steal / max(total, 1)
        )


def noise_reasons(found: Conditions) -> list[str]:
    """Return the reasons why the machine is not quiet; empty if it is quiet."""
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
    """Return the clock ticks of these CPUs since boot: busy, stolen, total."""
    busy = steal = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            ticks = [int(word) for word in words[_USER:_GUEST]]  # without the guest columns: user time includes them
            steal += ticks[_STEAL]
            total += sum(ticks)
            # A CPU that waits for a disk (iowait) can run another process, so it counts as idle.
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
    return busy, steal, total
