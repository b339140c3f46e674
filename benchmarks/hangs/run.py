"""Plants hangs and checks whether a report names the right rank and line in time.

    python benchmarks/hangs/run.py --launchers torchrun,allranks --backends gloo --json benchmarks/hangs.json

Each case starts ``program.py KIND BACKEND`` with three ranks and waits for a report. A case is correct if the report
names the culprit's rank and the line that the program marks. A process that is stopped or has exited cannot report its
line; there, the report must name the rank and the state of its process.

With ``srun``, the ranks run on two hosts, which are network namespaces of this machine with their own SLURM
(tests/support; root). The other launchers start them on this host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.cluster import cluster
from support.slurm import Slurm, slurm

PROGRAM = Path(__file__).with_name("program.py")
ROOT = PROGRAM.parents[2]
LIMIT_S = 10.0
STARTED = re.compile(r"hangs from (\d+\.\d+)")
# Lines of a report of a watcher or of the launcher, and of a MismatchError, which allranks raises in place of a hang.
# The notices of a rendezvous after 5 s name no line.
REPORT = re.compile(
    r"(have|has) waited \d+ s in |deadlock: |collective \d+ of the group|^ *(\[\w+\]:?)? *rank \d at \S+:\d+"
)
# What a report contains about a process that cannot report its line.
STATES = {"stopped": "stopped"}


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Attributes:
        kind: The kind of the hang.
        backend: The backend of the default group.
        launcher: What started the ranks.
        correct: The report named the culprit.
        after_s: Seconds from the start of the hang to the report. None without a report.
        report: The report.
    """

    kind: str
    backend: str
    launcher: str
    correct: bool
    after_s: float | None
    report: str


def kinds() -> list[str]:
    """Return the kinds of hangs of the program, in its order."""
    text = PROGRAM.read_text()
    return re.findall(r"\w+", text[text.index("KINDS = [") + 9 : text.index("]  # fmt: skip")])


def culprits(kind: str) -> list[tuple[int, int]]:
    """Return rank and line of each mark of a kind."""
    found, function = [], ""
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1):
        if name := re.match(r"def (\w+)", line):
            function = name[1]
        mark = re.search(r"# culprit(?: of (\w+))?: (\d)", line)
        if mark and (mark[1] or function) == kind:
            found.append((int(mark[2]), number))
    return found


def command(launcher: str, kind: str, backend: str, port: int) -> list[str]:
    """Return the command that starts the program."""
    program = [str(PROGRAM), kind, backend]
    if launcher == "torchrun":
        return ["torchrun", "--nproc-per-node", "3", "--master-port", str(port), *program]
    if launcher == "allranks":
        return [sys.executable, "-m", "allranks", "run", "-n", "3", *program]
    if launcher == "mpirun":
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, *program]
    variables = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    words = f'export {variables}; exec "$@"'
    return ["srun", "-N", "2", "-n", "3", "bash", "-c", words, "-", sys.executable, *program]


def plant(kind: str, backend: str, launcher: str, port: int, slurm: Slurm | None) -> Result:
    """Run one case."""
    environ = os.environ | {"ALLRANKS_WATCH": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(port)}
    words = command(launcher, kind, backend, port)
    if launcher == "srun":
        assert slurm is not None
        head = slurm.hosts.hosts[0]
        environ |= {**slurm.environ, "MASTER_ADDR": head.address, "GLOO_SOCKET_IFNAME": "eth0"}
        words = head.inside(*words)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryDirectory() as folder:
        environ["ALLRANKS_WATCH_FOLDER"] = folder
        job = subprocess.Popen(words, stdout=out, stderr=out, env=environ, start_new_session=True)
        try:
            text, report_at = _read(out, job)
        finally:
            _end(job, kind, port)
    starts = [float(each) for each in STARTED.findall(text)]
    # The hang begins when the last rank arrives at it.
    began = max(starts, default=None)
    lines = [line for line in text.splitlines() if REPORT.search(line)]
    report = "\n".join(lines).replace(f"{ROOT}{os.sep}", "")
    after_s = report_at - began if report_at is not None and began is not None else None
    return Result(kind, backend, launcher, report_at is not None and _names_culprit(kind, report), after_s, report)


def _names_culprit(kind: str, report: str) -> bool:
    if kind in STATES:
        return "rank 1" in report and STATES[kind] in report
    return any(
        re.search(rf"\branks? (\d, )*{rank}\b", report) and re.search(rf"program\.py:{line}\b", report)
        for rank, line in culprits(kind)
    )


def _read(out: object, job: subprocess.Popen[bytes]) -> tuple[str, float | None]:
    """Return the output and the time of the report. Give up if there is none."""
    until = time.time() + 60 + LIMIT_S
    while time.time() < until:
        out.seek(0)
        text = out.read()
        if any(REPORT.search(line) for line in text.splitlines()):
            at = time.time()
            time.sleep(0.3)  # for the lines after the first one
            out.seek(0)
            return out.read(), at
        starts = [float(each) for each in STARTED.findall(text)]
        if starts and time.time() > max(starts) + 2 * LIMIT_S:
            return text, None
        if job.poll() is not None and not starts:
            return text, None
        time.sleep(0.1)
    return text, None


def _end(job: subprocess.Popen[bytes], kind: str, port: int) -> None:
    """End the job and all of its ranks, also those in other sessions."""
    mine = [pid for pid in _with_environment(f"MASTER_PORT={port}") if pid != os.getpid()]
    ranks = [pid for pid in mine if not _name(pid).startswith("srun")]
    _kill(ranks)
    # SLURM frees the nodes when srun detects the exit of the ranks. The ranks of a killed srun keep them for a minute.
    with suppress(subprocess.TimeoutExpired):
        job.wait(5 if "srun" in job.args else 0)
    _kill([job.pid, *mine])
    job.wait()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _with_environment(setting: str) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if (
                setting.encode() in environ.split(b"\0")
                and b"hangs/program.py" in Path(f"/proc/{name}/cmdline").read_bytes()
            ):
                yield int(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(kinds()))
    parser.add_argument("--backends", default="gloo")
    parser.add_argument("--launchers", default="torchrun")
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = [
        (kind, backend, launcher)
        for launcher in args.launchers.split(",")
        for backend in args.backends.split(",")
        for kind in args.kinds.split(",")
    ]
    for launcher in args.launchers.split(","):
        name = {"allranks": sys.executable}.get(launcher, launcher)
        if shutil.which(name) is None:
            parser.error(f"{name} is not installed")

    def run(number: int) -> Result:
        result = plant(*cases[number], 29500 + number, cluster_of_jobs)
        after = "no report" if result.after_s is None else f"{result.after_s:.1f} s"
        print(f"{'correct' if result.correct else 'WRONG'}  {result.launcher} {result.backend} {result.kind}: {after}")
        print("".join(f"    {line[:400]}\n" for line in result.report.splitlines()[:3]), end="", flush=True)
        return result

    with ExitStack() as stack, ThreadPoolExecutor(args.parallel) as pool:
        cluster_of_jobs = None
        if "srun" in args.launchers:
            cluster_of_jobs = stack.enter_context(slurm(stack.enter_context(cluster(2))))
        results = list(pool.map(run, range(len(cases))))
    correct = sum(result.correct for result in results)
    late = [result for result in results if result.after_s is None or result.after_s > LIMIT_S + 1]
    print(f"{correct} of {len(results)} correct, {len(results) - len(late)} within {LIMIT_S + 1:g} s")
    if args.json:
        Path(args.json).write_text(json.dumps({"results": [asdict(result) for result in results]}, indent=1) + "\n")
        return 0  # the results contain the missed cases
    return 0 if correct == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
