"""Run the checks of tests/gpu on CUDA tensors, for each engine that supports them.

    python tests/gpu/run.py                        # all, in at most 8 minutes
    python tests/gpu/run.py nccl graphs            # rows with one of these words in their names
    python tests/gpu/run.py --several-ranks-per-gpu --nccl FOLDER    # nccl with 2 and 4 ranks on one GPU
    python tests/gpu/run.py --device cpu           # the same rows on CPU tensors, gloo instead of nccl

Each row runs in processes of its own, with a time limit. Its result is printed, and written to the report
(--report, and gpu-report.md in the folder $OUT), when it ends: ok, FAIL or "not run". The time includes the start of
the ranks and of CUDA. Rows run concurrently, except those that measure a time. A killed run leaves the rows that have
ended.

Exit codes: 0: all rows are ok. 1: a row failed, or was not run because the time was over. 77: nothing was run, because
something that the checks need is missing; the output names it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from table import Row

SKIPPED = 77  # test runners interpret this exit code as "skipped"
NEEDED = ("torch", "allranks", "cloudpickle", "pytest")
SEVERAL_PER_GPU_FROM = 23000  # the first version of nccl (2.30.0) with NCCL_MULTI_RANK_GPU_ENABLE
CLEANUP_S = 15.0  # seconds in which a row ends after its limit: stacks are written, ranks are killed


class Result(NamedTuple):
    """The end of one row."""

    ended: str
    seconds: float
    text: str


class Report:
    """Prints rows, and writes them to files.

    Args:
        files: Each is replaced after every row, so it is complete even if this process is killed.
        about: Lines about the machine and the versions.
        count: Number of rows.
    """

    def __init__(self, files: list[Path], about: list[str], count: int) -> None:
        self.ended: list[str] = []
        self._files = files
        self._about = about
        self._count = count
        self._rows: list[str] = []
        self._failures: list[str] = []
        print("\n".join(about), end="\n\n")
        print(f"{'check':<60} {'':<7} {'s':>6}  measured", flush=True)
        self._write()

    def add(self, row: Row, result: Result) -> None:
        self.ended.append(result.ended)
        measured = "" if result.ended == "FAIL" else result.text
        print(f"{row.name:<60} {result.ended:<7} {result.seconds:>6.1f}  {measured}", flush=True)
        cells = row.check, row.backend, row.ranks, result.ended, f"{result.seconds:.1f}", measured
        self._rows.append(f"| {' | '.join(map(str, cells))} |")
        if result.ended == "FAIL":
            self._failures.append(f"### {row.name}\n\n````text\n{result.text.rstrip()}\n````\n")
            print(f"{result.text}\n", file=sys.stderr, flush=True)
        self._write()

    def summary(self) -> str:
        counts = [f"{ended}: {self.ended.count(ended)}" for ended in ("ok", "FAIL", "not run")]
        return f"{len(self.ended)} of {self._count} rows. {', '.join(counts)}"

    def _write(self) -> None:
        lines = ["# Checks of tests/gpu", "", *(f"- {line}" for line in self._about), f"- {self.summary()}", ""]
        lines += ["| check | engine | ranks | result | s | measured |", "|---|---|---|---|---|---|", *self._rows, ""]
        lines += ["## Failures", "", *self._failures] if self._failures else []
        for file in self._files:
            part = file.with_name(f"{file.name}.part")
            part.write_text("\n".join(lines))
            part.replace(file)


def run_row(row: Row, limit_s: float) -> Result:
    """Run a row in this process, which is a lane."""
    began = time.monotonic()
    try:
        text, ended = row.run(limit_s), "ok"
    except Exception as error:  # noqa: BLE001 - the row fails, with any error in the report
        text, ended = f"{type(error).__name__}: {error}", "FAIL"
    return Result(ended, time.monotonic() - began, text)


def run_rows(rows: list[Row], report: Report, lanes: int, limit_s: float, deadline: float) -> bool:
    """Run rows until the deadline. Return whether all of their processes have ended."""

    def open_lanes() -> ProcessPoolExecutor:
        # Spawned, not forked: each lane has a fork server of its own, and no state of CUDA.
        return ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn"))

    left = deque(rows)
    running: dict[Future[Result], tuple[Row, float, float]] = {}
    pool, all_ended = open_lanes(), True
    while True:
        now = time.monotonic()
        while left and len(running) < lanes and (rest_s := deadline - now - CLEANUP_S) > 0:
            row, row_s = left.popleft(), min(limit_s, rest_s)
            running[pool.submit(run_row, row, row_s)] = row, now, now + row_s + CLEANUP_S
        if not running:
            break
        next_end = min(end for _, _, end in running.values())
        done, _ = wait(running, timeout=max(0.0, next_end - now), return_when=FIRST_COMPLETED)
        for future in done:
            report.add(running.pop(future)[0], future.result())
        now = time.monotonic()
        for future, (row, began, end) in list(running.items()):
            if now >= end:
                # A process that waits in the driver cannot be killed, and blocks its lane. Other rows get new lanes.
                report.add(row, Result("FAIL", now - began, "its processes did not end after they were killed"))
                del running[future]
                pool.shutdown(wait=False)
                pool, all_ended = open_lanes(), False
    for row in left:
        report.add(row, Result("not run", 0.0, ""))
    pool.shutdown()
    return all_ended


def skip(text: str) -> NoReturn:
    print(f"run.py: no check was run: {text}", file=sys.stderr)
    raise SystemExit(SKIPPED)


def loaded_nccl() -> int:
    """Return the version of the nccl that torch has loaded, as 23007 for 2.30.7.

    ``torch.cuda.nccl.version()`` returns the version with which torch was compiled.
    """
    import torch  # noqa: F401 - loads the library

    version = ctypes.c_int()
    if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)):
        raise RuntimeError("ncclGetVersion failed")
    return version.value


def preload(path: Path) -> NoReturn:
    """Start again with a library of nccl that replaces torch's.

    torch finds its own one by an RPATH, which precedes LD_LIBRARY_PATH.
    """
    library = path if path.is_file() else next(path.rglob("libnccl.so.2"), None)
    if library is None:
        raise SystemExit(f"run.py: --nccl: there is no libnccl.so.2 in {path}")
    words = [word for word in os.environ.get("LD_PRELOAD", "").split(":") if word]
    environ = os.environ | {"LD_PRELOAD": ":".join([str(library.resolve()), *words])}
    arguments = list(sys.argv)
    at = next(n for n, word in enumerate(arguments) if word.startswith("--nccl"))
    del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    os.execve(sys.executable, [sys.executable, *arguments], environ)


def gpu_names() -> str:
    """Return name, driver and memory of the GPUs. No CUDA is initialized: a broken driver could hang this process."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return "; ".join((done.stdout or done.stderr).strip().splitlines())


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("words", nargs="*", help="run only rows with one of these words in their names")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: find errors in the checks without a GPU")
    add("--several-ranks-per-gpu", action="store_true", help="nccl 2.30 or newer: 2 and 4 ranks on one GPU")
    add("--nccl", type=Path, metavar="PATH", help="libnccl.so.2, or a folder with it, to use instead of torch's")
    add("--report", type=Path, metavar="FILE", help="Markdown file to which the rows are written")
    add("--limit", type=float, default=60.0, metavar="S", help="seconds for a row (default: 60)")
    add("--budget", type=float, default=470.0, metavar="S", help="seconds for all rows (default: 470)")
    add("--jobs", type=int, metavar="N", help="rows that run concurrently (default: one per 4 CPUs, at most 4)")
    add("--list", action="store_true", help="print the names of the rows")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run the selected rows and return the exit code."""
    began = time.monotonic()
    options = parse(argv)
    if options.nccl is not None:
        preload(options.nccl)
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        skip(
            f"{', '.join(lacking)} must be installed (torch with CUDA, allranks with its compiled core).\n  Without a"
            f" network: pip install --no-index --find-links FOLDER {' '.join(lacking)}, with a folder of wheels."
        )
    # The ranks are forked from processes that have imported torch. CUDA does not work in a child of a process that has
    # counted GPUs through CUDA, so torch must count them through NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    gpus = torch.cuda.device_count()  # does not initialize CUDA
    about = [
        shlex.join(["run.py", *argv]),
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        f"CPUs: {os.cpu_count()}",
    ]
    if options.device == "cuda":
        if not gpus:
            skip(f"no NVIDIA GPU that this torch ({torch.__version__}, CUDA {torch.version.cuda}) can use.")
        if not torch.distributed.is_nccl_available():
            skip(f"this torch ({torch.__version__}) has no nccl.")
        version = loaded_nccl()
        about += [f"nccl {version}, GPUs: {gpus}: {gpu_names()}"]
        if options.several_ranks_per_gpu and version < SEVERAL_PER_GPU_FROM:
            skip(
                f"the loaded nccl ({version}) is older than {SEVERAL_PER_GPU_FROM} and permits one rank per GPU only.\n"
                "  Pass a newer one: pip install --no-deps --target FOLDER 'nvidia-nccl-cu13>=2.30' (cu12 for a torch"
                " with CUDA 12), then --nccl FOLDER."
            )
    from table import rows, several_per_gpu

    table = several_per_gpu(options.device) if options.several_ranks_per_gpu else rows(options.device, max(gpus, 1))
    selected = [row for row in table if not options.words or any(word in row.name for word in options.words)]
    if options.list:
        print("\n".join(row.name for row in selected))
        return 0
    # The ranks of nccl on one GPU share its time: concurrent rows would only slow each other down.
    lanes = options.jobs or (1 if options.several_ranks_per_gpu else max(1, min(4, (os.cpu_count() or 1) // 4)))
    files = [options.report] if options.report else []
    files += [Path(os.environ["OUT"]) / "gpu-report.md"] if os.environ.get("OUT") else []
    report = Report(files, about, len(selected))
    deadline = began + options.budget
    all_ended = True
    for rows_now, lanes_now in (([r for r in selected if not r.alone], lanes), ([r for r in selected if r.alone], 1)):
        if rows_now:
            all_ended = run_rows(rows_now, report, lanes_now, options.limit, deadline) and all_ended
    print(f"\n{report.summary()}, {time.monotonic() - began:.0f} s", flush=True)
    code = int(report.ended.count("ok") < len(selected))
    if not all_ended:
        os._exit(code)  # an orderly exit would wait for their lanes
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
