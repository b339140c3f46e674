"""Checks that are whole jobs under a launcher: the watcher, the recovery after a loss, master-worker mode."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ALLRANKS = [sys.executable, "-m", "allranks"]
_TERMINATION_S = 5.0  # seconds in which a launcher can stop its ranks before it is killed


class JobError(AssertionError):
    """A job did not finish in time, or its output is wrong."""


def hang(kind: str, env: Mapping[str, str], limit_s: float, backend: str, cause: str) -> str:
    """Check that the watcher names rank 1 with its line while rank 0 waits for it. ``cause``: see job_hang.py."""
    lines = (FOLDER / "job_hang.py").read_text().splitlines()
    waits, late = (next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")) for mark in
                   (f"waits: {cause}", cause))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="allranks-gpu-") as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*ALLRANKS, "watch", "--after", "4s", "--folder", folder, "--", *torchrun]
        output = _run([*command, str(FOLDER / "job_hang.py"), kind, backend, cause], env, limit_s)
    report = re.search(
        rf"rank 0 has waited (\d+) s in all_reduce #\d+ \(\S*job_hang.py:{waits}(?: in <module>)?\) for rank 1, which"
        rf" is at \S*job_hang.py:{late} in <module>",
        output,
    )
    if report is None:
        raise JobError(f"no report that rank 0 waits at line {waits} for rank 1 at line {late}:\n{output}")
    return f"named after {report[1]} s"


def recovery(kind: str, env: Mapping[str, str], limit_s: float, backend: str) -> str:
    """Check that killed ranks are replaced, and that the weights have the bits of an undisturbed run."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **env}  # results of cuBLAS are reproducible only with this

    def digests(*kills: str) -> set[str]:
        command = [*ALLRANKS, "run", "-n", "3", "--elastic", "2", str(FOLDER / "job_recovery.py"), kind, backend]
        output = _run([*command, *kills], env, limit_s / 2)
        ends = re.findall(r"end (\d) (\d) (\d) (\w{16})$", output, re.MULTILINE)
        found = {end[3] for end in ends}
        if sorted(end[:3] for end in ends) != [(str(rank), "3", str(len(kills))) for rank in range(3)]:
            raise JobError(f"not all of 3 ranks finished, or not {len(kills)} were replaced:\n{output}")
        return found

    undisturbed, disturbed = digests(), digests("5:1", "12:0")
    if len(undisturbed) != 1 or undisturbed != disturbed:
        raise JobError(f"digests of the weights: {undisturbed} undisturbed, {disturbed} with two killed ranks")
    return "2 ranks killed, same bits"


def workers(kind: str, env: Mapping[str, str], limit_s: float, _backend: str) -> str:
    """Check master-worker mode, which always uses the native engine. Workers share the GPU."""
    output = _run([sys.executable, str(FOLDER / "job_workers.py"), kind], env, limit_s)
    if output.splitlines()[-1:] != ["done"]:
        raise JobError(f"the program did not finish:\n{output}")
    return ""


def _run(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
    """Run a job and return its output."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as job:
        try:
            output, _ = job.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as expired:
            # The launcher first: it also stops ranks in sessions of their own.
            job.terminate()
            try:
                output, _ = job.communicate(timeout=_TERMINATION_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                output, _ = job.communicate()
            raise JobError(f"the job has not finished after {limit_s:.0f} s. Its output:\n{output}") from expired
    if job.returncode:
        raise JobError(f"exit code {job.returncode}. Its output:\n{output}")
    return output
