"""Checks in a job: the ranks meet, send the results of their checks to rank 0, and measure messages, pair by pair.

Latency is half a round trip of 8 bytes, the median of many. Bandwidth is that of a large message, the fastest of
several. Clocks are compared as in NTP: of several round trips, the shortest gives the best estimate of the time at
which the peer read its clock.
"""

from __future__ import annotations

import importlib
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from allranks._base.errors import AllranksError
from allranks._cluster.env import read_env
from allranks._cluster.network import machine
from allranks.tools.doctor import software
from allranks.tools.doctor.check import Check
from allranks.tools.doctor.options import DoctorOptions
from allranks.tools.doctor.pairs import Pair, Pairs, kinds, outliers, rounds
from allranks.tools.doctor.report import DoctorFacts, DoctorLine, DoctorReport, compare_versions, merge

if TYPE_CHECKING:
    import torch

__all__ = ["examine", "facts", "judge_clock", "judge_pairs"]

_ROUND_TRIPS, _WARM_UP = 60, 10
_LARGE = 3  # large messages, of which the fastest counts
_CLOCK_SAMPLES = 16  # round trips per comparison of clocks
_SKEW_S = 0.1  # with more, log lines of two hosts cannot be put in order
_SLOW_US = 100.0  # an outlier must also be slow: on an idle host, latencies differ by more than a factor

_Figure = Callable[[Pair], float]
_FIGURES: tuple[tuple[str, str, _Figure, _Figure], ...] = (
    ("latency", "us", lambda p: p.latency_us, lambda p: max(p.latency_us, _SLOW_US)),
    ("bandwidth", "GB/s", lambda p: p.bandwidth_gb_s, lambda p: 1 / p.bandwidth_gb_s),
)


def facts(checks: Sequence[Check], rank: int = 0) -> DoctorFacts:
    """Return the facts that this process reports about itself."""
    return DoctorFacts(rank, socket.gethostname(), machine(), software.versions(), checks)


def examine(checks: Sequence[Check], wanted: DoctorOptions) -> DoctorReport | None:
    """Return the report of this process or, on rank 0 of a job, of the job.

    Args:
        checks: The results of the checks of this process.
        wanted: The options.

    Returns:
        The report; None on the other ranks of a job.

    Raises:
        ConfigError: The variables that identify this rank are inconsistent.
    """
    env = read_env()
    own = facts(checks, env.rank)
    if env.world_size == 1:
        return DoctorReport(merge([own]))
    reporter = f"rank {env.rank} on {own.host}"
    report = DoctorReport(
        [DoctorLine(*check, where=reporter) for check in checks]
    )  # the report if the ranks do not meet
    try:
        import allranks

        importlib.import_module("torch")  # fail before waiting for the other ranks if torch is missing
        allranks.init_process_group("native", timeout=wanted.timeout_s)
    except (AllranksError, ImportError, OSError) as error:
        report.lines.append(_failure("join", error, reporter))
        return report
    try:
        report = _gather(own)
        report.lines += _clocks(report, own)
        report.pairs = _measure(env.rank, env.world_size, wanted.nbytes)
        machines = _gather_texts(own.machine)
    except AllranksError as error:
        report.lines.append(_failure("reach", error, reporter))
        return report
    allranks.destroy_process_group()
    if env.rank != 0:
        return None
    report.lines += judge_pairs(report.pairs, report.hosts, machines)
    return report


def judge_pairs(pairs: Pairs, hosts: Sequence[str], machines: Sequence[str]) -> list[DoctorLine]:
    """Return lines with the median figures and the outlier pairs.

    Args:
        pairs: The measurements.
        hosts: The name of each rank's host.
        machines: For each rank, a text that is the same for all ranks of a host.
    """
    lines = []
    for kind, some in kinds(pairs, machines).items():
        for name, unit, figure, badness in _FIGURES:
            figures = [figure(pair) for pair in some]
            measured = (
                f"{kind} {statistics.median(figures):.3g} {unit} (median of {len(some)} pairs, "
                f"{min(figures):.3g} to {max(figures):.3g})"
            )
            bad = outliers(some, badness)
            if bad:
                named = ", ".join(
                    f"ranks {p.first} ({hosts[p.first]}) and {p.second} ({hosts[p.second]}): {figure(p):.3g}"
                    for p in bad[:3]
                )
                advice = "Check for another job there, a slow link, or a wrong interface (ALLRANKS_IFACE)."
                lines.append(DoctorLine(name, "warn", f"{measured}; {named}", advice))
            else:
                lines.append(DoctorLine(name, "ok", measured))
    return lines


def judge_clock(host: str, ahead_s: float, error_s: float) -> DoctorLine:
    """Return a line on the offset of a host's clock from rank 0's.

    Args:
        host: The name of the host.
        ahead_s: The offset; negative if the clock is behind.
        error_s: The uncertainty of the offset.
    """
    way = "ahead of" if ahead_s >= 0 else "behind"
    measured = f"{abs(ahead_s) * 1e3:.2f} ms {way} rank 0's, +- {error_s * 1e3:.2f} ms"
    if abs(ahead_s) - error_s > _SKEW_S:
        return DoctorLine(
            "clock",
            "warn",
            measured,
            "Synchronize the clocks of the hosts with chrony (`chronyc makestep`) or ntpd.",
            host,
        )
    return DoctorLine("clock", "ok", measured, where=host)


def _failure(name: str, error: Exception, reporter: str) -> DoctorLine:
    text, _, advice = str(error).partition("\n")
    is_allranks_error = isinstance(error, AllranksError)
    return DoctorLine(
        name,
        "FAIL",
        text if is_allranks_error else f"{type(error).__name__}: {text}",
        " ".join(advice.split())
        or "Check that all ranks are running, and that the hosts can connect to each other (see ports, interfaces).",
        reporter,
    )


def _gather_texts(word: str) -> list[str]:
    import allranks

    words: list[str] = [""] * allranks.get_world_size()
    allranks.all_gather_object(words, word)
    return words


def _gather(own: DoctorFacts) -> DoctorReport:
    """Gather the facts of all ranks into a report, on every rank."""
    import allranks

    gathered: list[tuple[int, str, str, dict[str, str], list[tuple[str, ...]]] | None]
    gathered = [None] * allranks.get_world_size()
    # Plain values, which can also be sent without pickle.
    own_facts = (own.rank, own.host, own.machine, dict(own.versions), [tuple(check) for check in own.checks])
    allranks.all_gather_object(gathered, own_facts)
    collected = [
        DoctorFacts(rank, host, where, versions, [Check(*check) for check in checks])  # type: ignore[arg-type]
        for rank, host, where, versions, checks in filter(None, gathered)
    ]
    return DoctorReport(merge(collected) + compare_versions(collected), [each.host for each in collected])


def _clocks(report: DoctorReport, own: DoctorFacts) -> list[DoctorLine]:
    """Compare rank 0's clock with that of the first rank of each other host."""
    import torch

    import allranks

    machines = _gather_texts(own.machine)
    firsts = [machines.index(each) for each in dict.fromkeys(machines) if each != machines[0]]
    now = torch.zeros(1, dtype=torch.float64)
    lines = []
    for peer in firsts:
        samples = []
        for _ in range(_CLOCK_SAMPLES):
            if own.rank == 0:
                asked = time.time()
                allranks.send(now, peer)
                allranks.recv(now, peer)
                answered = time.time()
                samples.append((answered - asked, float(now) - (asked + answered) / 2))
            elif own.rank == peer:
                allranks.recv(now, 0)
                now[0] = time.time()
                allranks.send(now, 0)
        if own.rank == 0:
            # The peer read its clock during the round trip, so the error is at most half of it.
            took, ahead = min(samples)
            lines.append(judge_clock(report.hosts[peer], ahead, took / 2))
    return lines


def _measure(rank: int, size: int, nbytes: int) -> Pairs:
    import torch

    import allranks

    small, large = torch.zeros(1, dtype=torch.int64), torch.zeros(nbytes, dtype=torch.uint8)
    drawn = rounds(size)
    found: list[tuple[int, int, float, float]] = []
    for together in drawn:
        # A round ends before the next one begins, so that other pairs do not disturb a measurement.
        allranks.barrier()
        own_pair = next((pair for pair in together if rank in pair), None)
        if own_pair is None:
            continue
        peer, leads = (own_pair[1], True) if rank == own_pair[0] else (own_pair[0], False)
        times = _round_trips(small, peer, leads, _WARM_UP + _ROUND_TRIPS)[_WARM_UP:]
        long = _round_trips(large, peer, leads, 1 + _LARGE)[1:]
        if leads:
            found.append((*own_pair, statistics.median(times) / 2 * 1e6, nbytes / (min(long) / 2) / 1e9))
    gathered: list[list[tuple[int, int, float, float]]] = [[] for _ in range(size)]
    allranks.all_gather_object(gathered, found)
    pairs = tuple(Pair(*pair) for some in gathered for pair in some)
    return Pairs(pairs, nbytes, all(len(together) == 1 for together in drawn))


def _round_trips(message: torch.Tensor, peer: int, leads: bool, n: int) -> list[float]:
    import allranks

    times = []
    for _ in range(n):
        began = time.perf_counter()
        if leads:
            allranks.send(message, peer)
            allranks.recv(message, peer)
        else:
            allranks.recv(message, peer)
            allranks.send(message, peer)
        times.append(time.perf_counter() - began)
    return times
