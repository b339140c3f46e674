"""``allranks bench``: what a call costs here, beside what it costs with another library.

Both are timed in the same processes, in alternating blocks, so that a machine whose speed drifts
slows them alike; figures are medians over the blocks, and the ratio is that of the medians. A
block is a run of back-to-back calls after a barrier; its time is that of the slowest rank. Before
it is timed, each size is run once on known data and every element compared with the right answer.

The columns are those of nccl-tests (its PERFORMANCE.md defines them)::

    algbw = bytes / time                 what the program sees
    busbw = algbw * 2 (P - 1) / P        all_reduce: what the busiest link must carry

torch.distributed is used here as the peer that is measured, through its public functions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from allranks._host import usable_cpus

if TYPE_CHECKING:
    import torch

__all__ = ["Report", "Row", "Timing", "main"]

_VERBS = ("all_reduce",)
_PEERS = ("gloo",)
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_BLOCK_S = 0.01


@dataclass
class Timing:
    """One engine at one size: seconds per call."""

    median_s: float
    fastest_s: float
    slowest_s: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int


@dataclass
class Row:
    """One size."""

    nbytes: int
    count: int
    calls_per_block: int
    timings: dict[str, Timing]
    ratios: dict[str, float]  # peer's median / native's


@dataclass
class Report:
    """A whole run."""

    verb: str
    dtype: str
    op: str
    ranks: int
    cpus: int
    host: str
    processor: str
    versions: dict[str, str]
    blocks: int
    rows: list[Row] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """The command. Starts the ranks, each of which runs this again; returns the exit code."""
    options = _parse(argv)
    if "ALLRANKS_BENCH_RANK" in os.environ:
        return _run_rank(options)
    from allranks.launch import cli

    os.environ["ALLRANKS_BENCH_RANK"] = "1"
    # Rank 0 prints the table; the other ranks have nothing to say.
    return cli.main(["-n", str(options.nproc), "--show", "0", "-q", __file__, *argv])


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return int(number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 16K or 64M") from None


def _peer(text: str) -> str:
    if text not in _PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be compared with; known: {', '.join(_PEERS)}")
    return text


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="allranks bench", description="Time a call, beside another library's, in the same processes."
    )
    parser.add_argument("verb", choices=_VERBS)
    parser.add_argument("-n", "--nproc", type=int, default=2, help="ranks on this host (default 2)")
    parser.add_argument("--against", type=_peer, metavar="PEER", help=f"the peer to compare with: {', '.join(_PEERS)}")
    parser.add_argument("--min", type=_size, default=4, metavar="SIZE", help="smallest tensor in bytes (default 4)")
    parser.add_argument("--max", type=_size, default=64 << 20, metavar="SIZE", help="largest (default 64M)")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default 4)")
    parser.add_argument("--blocks", type=int, default=15, help="timed blocks for each size (default 15)")
    parser.add_argument("--dtype", default="float32", choices=_DTYPES, metavar="T", help="default float32")
    parser.add_argument("--op", default="SUM", choices=("SUM", "AVG", "PRODUCT", "MIN", "MAX"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.nproc < 1:
        parser.error("-n must be at least 1")
    if options.factor < 2 or options.blocks < 1 or not 1 <= options.min <= options.max:
        parser.error("expected --factor >= 2, --blocks >= 1 and 1 <= --min <= --max")
    if options.op == "AVG" and "float" not in options.dtype:
        parser.error("AVG takes floating-point dtypes")
    for file in (options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"no such directory: {file.absolute().parent}")
    return options


def _run_rank(options: argparse.Namespace) -> int:
    import torch

    import allranks as dist

    dtype: torch.dtype = getattr(torch, options.dtype)
    dist.init_process_group()
    op = dist.ReduceOp[options.op]
    calls: dict[str, Callable[[torch.Tensor], object]] = {"native": lambda t: dist.all_reduce(t, op)}
    if options.against is not None:
        calls[options.against] = _peer_call(options.against, options.op)
    report = Report(
        verb=options.verb,
        dtype=options.dtype,
        op=options.op,
        ranks=dist.get_world_size(),
        cpus=usable_cpus(),
        host=socket.gethostname(),
        processor=_processor(),
        versions={"allranks": dist.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        blocks=options.blocks,
    )
    first = dist.get_rank() == 0
    if first:
        print(_head(report, list(calls)), flush=True)
    nbytes = options.min
    while nbytes <= options.max:
        report.rows.append(_measure(calls, nbytes, dtype, op, options.blocks))
        if first:
            print(_line(report.rows[-1], report), flush=True)
        nbytes *= options.factor
    dist.destroy_process_group()
    if options.against is not None:
        import torch.distributed as peer

        peer.destroy_process_group()
    if first:
        wrong = sum(t.wrong for row in report.rows for t in row.timings.values())
        print(f"# wrong elements: {wrong}")
        if options.json:
            options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
        if options.plot:
            _plot(report, options.plot)
        return 1 if wrong else 0
    return 0


def _peer_call(name: str, op_name: str) -> Callable[[torch.Tensor], object]:
    import torch.distributed as peer

    peer.init_process_group(name)
    op = getattr(peer.ReduceOp, op_name)
    return lambda tensor: peer.all_reduce(tensor, op)


def _measure(
    calls: dict[str, Callable[[torch.Tensor], object]], nbytes: int, dtype: torch.dtype, op: int, blocks: int
) -> Row:
    import torch

    import allranks as dist

    ranks = dist.get_world_size()
    count = max(1, nbytes // dtype.itemsize)
    wrong = {name: _check(call, count, dtype, op) for name, call in calls.items()}
    tensors = {name: torch.zeros(count, dtype=dtype) for name in calls}
    longest = torch.zeros(1, dtype=torch.float64)

    def block(name: str, n: int) -> float:
        """Seconds per call, of the slowest rank."""
        call, tensor = calls[name], tensors[name]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(n):
            call(tensor)
        longest[0] = (time.perf_counter() - began) / n
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest[0])

    per_block = {}
    for name in calls:
        block(name, 2)  # memory is touched, connections are opened
        per_block[name] = max(3, min(2000, math.ceil(_BLOCK_S / block(name, 3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(blocks):
        order = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in order:
            samples[name].append(block(name, per_block[name]))
    timings = {}
    for name, times in samples.items():
        median = statistics.median(times)
        algbw = count * dtype.itemsize / median / 1e9
        timings[name] = Timing(median, min(times), max(times), algbw, algbw * 2 * (ranks - 1) / ranks, wrong[name])
    native = timings["native"].median_s
    ratios = {name: t.median_s / native for name, t in timings.items() if name != "native"}
    return Row(count * dtype.itemsize, count, per_block["native"], timings, ratios)


def _check(call: Callable[[torch.Tensor], object], count: int, dtype: torch.dtype, op: int) -> int:
    """How many elements of one call, over all ranks, are not what they should be."""
    import torch

    import allranks as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Small integers: exact in every dtype and order.
    index = torch.arange(count) % 3
    operands = [(index + r) % 3 for r in range(ranks)]
    stacked = torch.stack(operands).to(torch.float64)
    expected = {
        dist.ReduceOp.SUM: lambda: stacked.sum(0),
        dist.ReduceOp.AVG: lambda: stacked.mean(0),
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
        dist.ReduceOp.MIN: lambda: stacked.amin(0),
        dist.ReduceOp.MAX: lambda: stacked.amax(0),
    }[dist.ReduceOp(op)]()
    tensor = operands[rank].to(dtype)
    call(tensor)
    wrong = torch.tensor([int((tensor != expected.to(dtype)).sum())])
    dist.all_reduce(wrong)
    return int(wrong)


def _head(report: Report, engines: list[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    columns = "".join(f"  {f'{name}: us':>13} {'algbw':>7} {'busbw':>7} {'#wrong':>6}" for name in engines) + "".join(
        f"  {f'{name}/native':>13}" for name in engines[1:]
    )
    return (
        f"# {report.verb} {report.op}, in place, {report.ranks} ranks on {report.cpus} CPUs ({report.processor})\n"
        f"# {versions}; medians of {report.blocks} alternating blocks; algbw and busbw in GB/s\n"
        f"{'bytes':>10} {'count':>10} {'type':>9}{columns}"
    )


def _line(row: Row, report: Report) -> str:
    engines = "".join(
        f"  {t.median_s * 1e6:13.1f} {t.algbw_gb_s:7.2f} {t.busbw_gb_s:7.2f} {t.wrong:6d}" for t in row.timings.values()
    )
    ratios = "".join(f"  {f'{ratio:.1f}x':>13}" for ratio in row.ratios.values())
    return f"{row.nbytes:10d} {row.count:10d} {report.dtype:>9}{engines}{ratios}"


def _plot(report: Report, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    sizes = [row.nbytes for row in report.rows]
    for name in report.rows[0].timings:
        times = [row.timings[name] for row in report.rows]
        (line,) = axes.plot(sizes, [t.median_s * 1e6 for t in times], marker="o", label=name)
        axes.fill_between(
            sizes,
            [t.fastest_s * 1e6 for t in times],
            [t.slowest_s * 1e6 for t in times],
            color=line.get_color(),
            alpha=0.15,
        )
    for row in report.rows:
        for ratio in row.ratios.values():
            axes.annotate(
                f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x",
                (row.nbytes, row.timings["native"].median_s * 1e6),
                textcoords="offset points",
                xytext=(0, -14),
                ha="center",
                fontsize=8,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tensor size",
        ylabel="time per call (us)",
        title=f"{report.verb} {report.op} {report.dtype}, {report.ranks} ranks on {report.cpus} CPUs",
    )
    axes.margins(y=0.12)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_human(n) for n in sizes])
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(title="median; band: all blocks")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _human(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
