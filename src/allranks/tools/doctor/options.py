"""The command line of ``allranks doctor``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks._base.console import ArgumentParser
from allranks.tools.outputs import output_problem

__all__ = ["DoctorOptions", "parse", "without_nproc"]


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``allranks doctor``.

    Attributes:
        nproc: Start this many ranks on this host. None: this process runs alone, or is already a rank.
        json: The file for the report; ``-`` for stdout.
        plot: The file for the picture of the pairs.
        timeout_s: How long ranks wait for each other, in seconds.
        nbytes: Size of the messages that measure bandwidth.
        fabric: Test every provider of libfabric, also without a device of a fast network.
    """

    nproc: int | None = None
    json: Path | None = None
    plot: Path | None = None
    timeout_s: float = 30.0
    nbytes: int = 16 << 20
    fabric: bool = False


def parse(argv: Sequence[str]) -> DoctorOptions:
    """Parse the options. Exit with code 2 and one line if they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.nproc is not None and given.nproc < 1:
        parser.error(f"-n must be at least 1, not {given.nproc}")
    if not given.timeout > 0:
        parser.error(f"--timeout must be positive, not {given.timeout:g}")
    if given.megabytes < 1:
        parser.error(f"--megabytes must be at least 1, not {given.megabytes}")
    if why := output_problem(given.json, given.plot):
        parser.error(why)
    return DoctorOptions(given.nproc, given.json, given.plot, given.timeout, given.megabytes << 20, given.fabric)


def without_nproc(argv: Sequence[str]) -> list[str]:
    """Return the options without ``-n``, for the ranks."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("-n", "--nproc")
    return only.parse_known_args(argv)[1]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="allranks doctor",
        description="Check this host, or all hosts and all pairs of ranks of a job. Prints one line per check: ok, "
        "warn or FAIL, the measurement, and what to do. The exit code is 1 if a check failed.",
        epilog="In a job: allranks run -n 4 -- allranks doctor. For several hosts, start it on each host like any "
        "program, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.",
        examples=(
            ("allranks doctor", "this host: memory, limits, torch, engines"),
            ("allranks doctor -n 4", "this host, four ranks on it, and each pair of them"),
            ("allranks doctor --fabric", "also every provider of libfabric, with latency and bandwidth"),
            ("allranks run -H node0,node1 -- allranks doctor", "two hosts, and the network between them"),
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--nproc", type=int, metavar="N", help="start N ranks on this host and check them")
    add(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write the report as JSON, by default to stdout",
    )
    add("--plot", type=Path, metavar="FILE", help="plot latency and bandwidth of all pairs (requires matplotlib)")
    add("--timeout", type=float, default=30.0, metavar="S", help="seconds that ranks wait for each other (default 30)")
    add(
        "--megabytes",
        type=int,
        default=16,
        metavar="M",
        help="size in MiB of the messages that measure bandwidth (default 16)",
    )
    add("--fabric", action="store_true", help="test every provider of libfabric, also without a fast network")
    return parser
