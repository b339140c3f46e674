"""Checks of the environment in which a job starts: variables, the secret, remains of dead jobs."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from allranks._base.errors import ConfigError
from allranks._cluster.env import VARIABLES, JobEnv, read_env
from allranks._net.secret import load_secret, own_secret
from allranks.tools.doctor.check import Finding, fail, ok, warn

__all__ = ["CHECKS", "job_here", "judge_variables", "orphans", "unused_files"]

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE")
_OF_TESTS = "ALLRANKS_TEST_"
# Files of torch's DataLoader and multiprocessing, Open MPI, MPICH, NCCL.
_SHARED = ("torch_*", "psm_*", "sem.mp-*", "sm_segment.*", "vader_segment.*", "mpich_shm_*", "nccl-*")
_SETTLED_S = 60.0  # a process may still be creating a file that is newer
_LAUNCHERS = ("allranks", "torchrun", "torch.distributed", "mpirun", "mpiexec")


def job_here() -> JobEnv:
    """Return the job environment of this process; a single rank if the variables are inconsistent.

    For checks that also work with inconsistent variables.
    """
    try:
        return read_env()
    except ConfigError:
        return JobEnv(0, 1)


def variables() -> Finding:
    """Check the variables that init_process_group reads, and find unrecognized ALLRANKS_ variables."""
    return judge_variables(os.environ)


def judge_variables(environ: Mapping[str, str]) -> Finding:
    """Check whether a program with this environment can determine its rank."""
    there = {name: environ[name] for name in _RANKS if environ.get(name)}
    if "ALLRANKS_STORE" in there:
        there["ALLRANKS_STORE"] = "..."  # the value gives access to the job, so it is not printed
    described = (
        ", ".join(f"{name}={value}" for name, value in there.items()) or "RANK and similar variables are not set"
    )
    try:
        env = read_env(environ=environ)
    except ConfigError as error:
        return fail(
            f"{described}: {str(error).splitlines()[0]}",
            f"If these variables belong to another job, run `unset {' '.join(there)}`.",
        )
    known = [variable.name for variable in VARIABLES]
    unknown = [n for n in environ if n.startswith("ALLRANKS_") and n not in known and not n.startswith(_OF_TESTS)]
    if unknown:
        close = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
        names = ", ".join(f"{name} (did you mean {near[0]}?)" if near else name for name, near in close.items())
        return warn(f"{described}; allranks does not read {names}", "Correct or unset it.")
    return ok(f"{described}: rank {env.rank} of {env.world_size}")


def secret() -> Finding:
    """Check the secret that ranks of several hosts prove to each other."""
    environ = os.environ
    if environ.get("ALLRANKS_INSECURE", "").strip() not in ("", "0"):
        return warn(
            "ALLRANKS_INSECURE is set",
            "Any process that can reach the ports of this job can join it. Unset ALLRANKS_INSECURE.",
        )
    given = next((name for name in ("ALLRANKS_SECRET", "ALLRANKS_SECRET_FILE") if environ.get(name, "").strip()), "")
    if not given:
        try:
            file = own_secret(environ)
        except ConfigError as error:
            problem, _, advice = str(error).partition("\n")
            return warn(problem, advice.strip())  # only a warning: the launcher creates one for a job on this host
        if not file.exists():
            return ok(f"none yet: allranks creates {file} when it needs one")
        given = str(file)
    try:
        load_secret(environ)
    except ConfigError as error:
        problem, _, advice = str(error).partition("\n")
        return fail(problem, advice.strip() or "Create one: openssl rand -hex 32")
    return ok(f"from {given}")


def leftovers() -> Finding:
    """Find processes and files of this user's jobs that have lost their launcher."""
    lost = dict(orphans(Path("/proc")))
    files = unused_files(Path("/dev/shm"), Path("/proc"), time.time() - _SETTLED_S)
    if not lost and not files:
        return ok("none")
    advice = []
    findings = []
    if lost:
        findings.append("ranks without a launcher: " + ", ".join(f"{pid} ({command})" for pid, command in lost.items()))
        advice.append(f"If none of your jobs needs them, run `kill {' '.join(map(str, lost))}`.")
    if files:
        size = sum(file.stat().st_size for file in files if file.exists())
        findings.append(f"{len(files)} files in /dev/shm that no process uses, {size / (1 << 20):.0f} MiB")
        some = " ".join(map(str, files[:5])) + (" ..." if len(files) > 5 else "")
        advice.append(f"If none of your jobs needs them, run `rm {some}`.")
    return warn("; ".join(findings), " ".join(advice))


def orphans(proc: Path) -> Iterator[tuple[int, str]]:
    """Yield the pid and the command of each rank of this user whose parent has exited."""
    with suppress(OSError):  # it belongs to another user
        first = (proc / "1" / "cmdline").read_bytes().decode(errors="replace")
        if any(Path(word).name.startswith(_LAUNCHERS) for word in first.replace("\0", " ").split()):
            return  # the first process of the container is the launcher, and the parent of its ranks
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # the process has just ended, or belongs to another user
            if entry.stat().st_uid != os.geteuid() or entry.name in (str(os.getpid()), str(os.getppid()), "1"):
                continue
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            # Process 1 adopts orphans, unless a subreaper does. A zombie holds no resources of a job.
            if parent != "1" or state == "Z":
                continue
            environ = dict(part.partition(b"=")[::2] for part in (entry / "environ").read_bytes().split(b"\0"))
            if environ.get(b"RANK") and environ.get(b"WORLD_SIZE"):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                yield int(entry.name), " ".join(words).strip()[:60]


def unused_files(folder: Path, proc: Path, before: float) -> list[Path]:
    """Return this user's shared memory files that no process has open or mapped.

    Args:
        folder: The folder of the files.
        proc: The folder that lists the processes.
        before: Seconds since the epoch. Files modified later are skipped, because a process may be creating them.
    """
    found = []
    for pattern in _SHARED:
        for file in folder.glob(pattern):
            with suppress(FileNotFoundError):
                status = file.stat()
                if status.st_uid == os.geteuid() and status.st_mtime < before:
                    found.append(file)
    if not found:
        return []
    # Processes are read after the files: a file that a process creates later is not in the list.
    used: set[str] = set()
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended, or belongs to another user
            used.update(line.split(maxsplit=5)[5] for line in (entry / "maps").read_text().splitlines() if "/" in line)
            used.update(os.readlink(each) for each in (entry / "fd").iterdir())
    return sorted(file for file in found if str(file) not in used)


CHECKS: tuple[Callable[[], Finding], ...] = (variables, secret, leftovers)
