"""Make each system call of a job fail in turn: the result must be right, or a documented error must follow in time.

    python benchmarks/injection.py --list                         # possible injections, and their number
    python benchmarks/injection.py --sample 40 --seed 3           # a sample of them
    python benchmarks/injection.py --json benchmarks/injection.json
    python benchmarks/injection.py --only "rank0.0 start mmap 3 ENOMEM" --keep

The job has three ranks (injection_program.py). They start, compute, replace a killed rank, save a checkpoint, load it,
and exit. A first run counts the calls of each process in each of these phases (injection.c, preloaded). Each further
run makes one call fail with an error that the kernel can return, or makes it process half of the requested bytes:

    right      exit code 0, and all finished ranks computed the right sum
    error      another exit code, and a typed error of allranks or a launcher message that names the failure
    missed     the run did not make that call: the number of some calls depends on timing
    WRONG      anything else: a wrong sum, a hang (45 s), a crash, another exception, or remaining processes or files
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from random_programs_jobs import Done, Jobs

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("injection_program.py")
LIMIT_S = 45.0  # the program's timeout is 10 s, and --grace 3 s; a lost host is detected after 15 s
VERDICTS = ("right", "error", "missed", "WRONG")
SUM = f"{sum(range(8)) * 1000:g}"
_FILES = ("EMFILE", "ENFILE", "ENOMEM")
_DISK = ("ENOSPC", "EDQUOT", "EACCES")
ERRORS = {
    "socket": (*_FILES, "EPERM"), "socketpair": _FILES, "pipe2": _FILES, "eventfd": _FILES, "epoll_create1": _FILES,
    "bind": ("EADDRINUSE", "EACCES"), "listen": ("EADDRINUSE",),
    "connect": ("ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "EINTR"),
    "accept": ("EMFILE", "ENOMEM", "ECONNABORTED", "EINTR"),
    "memfd_create": ("EMFILE", "ENOMEM", "ENOSYS", "EPERM"), "ftruncate": ("ENOSPC", "EINTR", "EDQUOT"),
    "fallocate": ("ENOSPC", "EOPNOTSUPP", "EINTR"), "mmap": ("ENOMEM", "EPERM"),
    "open": (*_DISK, "EMFILE", "EINTR"), "mkdir": _DISK, "rename": _DISK, "fsync": ("EIO", "ENOSPC", "EINTR"),
    "fork": ("EAGAIN", "ENOMEM"), "pidfd_open": ("ENOSYS", "EMFILE", "EPERM"),
    "epoll_ctl": ("ENOSPC", "ENOMEM"), "epoll_wait": ("EINTR",),
    "write": ("ENOSPC", "EDQUOT", "EIO", "EINTR", "short"), "write_pipe": ("EPIPE", "EINTR", "short"),
    "writev": ("ENOSPC", "EINTR"), "read": ("EINTR", "short"),
    "send": ("EPIPE", "ECONNRESET", "ENOBUFS", "EINTR", "short"),
    "recv": ("ECONNRESET", "ETIMEDOUT", "EINTR", "short"),
    "sendmsg": ("ECONNRESET", "ENOBUFS", "EINTR"), "recvmsg": ("ECONNRESET", "EINTR", "EMFILE"),
}  # fmt: skip
_CRASH = re.compile(r"SIGSEGV|SIGABRT|SIGBUS|SIGFPE|terminate called|Fatal Python error|std::")
_LABEL = re.compile(r"^\[(\d)\] ")
_RAISED = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Garbled|Lost))\b")
_END = re.compile(r"^\[\d\] END (\d+) (\S+)$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Fault:
    """One failing call.

    Attributes:
        role: the process: launcher, helper (a process that it starts), or rank and number of previous starts.
        phase: the phase of the rank.
        call: the system call.
        number: number of the call in this process and phase, from 1.
        error: name of the errno; "short" for half of the bytes.
    """

    role: str
    phase: str
    call: str
    number: int
    error: str

    def __str__(self) -> str:
        return f"{self.role} {self.phase} {self.call} {self.number} {self.error}"


@dataclass(frozen=True)
class Outcome:
    """The verdict on a run (see VERDICTS), with `reason` in one line; `output` only for WRONG."""

    fault: Fault
    verdict: str
    reason: str
    output: str
    seconds: float


def compiled(folder: Path) -> Path:
    """Compile the library to preload, and return its path."""
    made = folder / "injection.so"
    source = Path(__file__).with_name("injection.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


class Injection:
    """Runner of the job with faults. Use it as a context manager."""

    def __enter__(self) -> Injection:
        self._folder = Path(tempfile.mkdtemp(prefix="injection-"))
        os.environ["LD_PRELOAD"] = str(compiled(self._folder))
        self._jobs = Jobs().__enter__()
        del os.environ["LD_PRELOAD"]
        self._numbers = itertools.count()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.__exit__()
        shutil.rmtree(self._folder)

    def faults(self) -> list[Fault]:
        """Return all faults that can be injected, from a run without a fault."""
        folder = self._folder / "log"
        done, left = self._run(folder, "log")
        verdict, reason = judge(done, left)
        assert verdict == "right", (reason, done)
        lines = (folder / "log").read_text().splitlines()
        counts: dict[tuple[str, str, str], Counter[str]] = {}
        for role, phase, call, pid in map(str.split, lines):
            counts.setdefault((role, phase, call), Counter())[pid] += 1
        return [
            Fault(*key, number, error)
            for key, found in sorted(counts.items())
            for number in range(1, max(found.values()) + 1)
            for error in ERRORS[key[2]]
        ]

    def run(self, fault: Fault, keep: bool = False) -> Outcome:
        """Run the job with one fault."""
        code = 0 if fault.error == "short" else getattr(errno, fault.error)
        folder = self._folder / f"run{next(self._numbers)}"
        done, left = self._run(folder, f"{fault.role} {fault.phase} {fault.call} {fault.number} {code}")
        if (folder / "done").exists():
            verdict, reason = judge(done, left, (fault.role, fault.call) == ("launcher", "write"))
        else:
            verdict, reason = judge(done, left)
            if verdict != "WRONG":
                verdict, reason = "missed", ""
        if keep:
            shutil.rmtree("injection-kept", ignore_errors=True)
            shutil.copytree(folder, "injection-kept")
        shutil.rmtree(folder)
        output = f"exit code {done.code}\n{done.out}\n{done.err}" if verdict == "WRONG" or keep else ""
        return Outcome(fault, verdict, reason, output, done.seconds)

    def run_all(self, faults: Sequence[Fault], at_once: int) -> Iterator[Outcome]:
        """Run the job with each of these faults."""
        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(self.run, faults)

    def _run(self, folder: Path, inject: str) -> tuple[Done, list[str]]:
        (folder / "tmp").mkdir(parents=True)
        shared = set(os.listdir("/dev/shm"))
        environ = {
            "INJECT": inject,
            "INJECT_LOG": str(folder / "log"),
            "INJECT_DONE": str(folder / "done"),
            "TMPDIR": str(folder / "tmp"),
        }
        words = ["run", "-n", "3", "--elastic", "2", "--grace", "3", str(PROGRAM), "checkpoints"]
        done = self._jobs.run(words, folder, environ, LIMIT_S)
        left = [f"process {pid}: {words}" for pid, words in processes(folder).items()]
        left += [f"/dev/shm/{each}" for each in set(os.listdir("/dev/shm")) - shared if "allranks" in each]
        left += [f"{each.name} in TMPDIR" for each in (folder / "tmp").iterdir()]
        return done, left


def processes(folder: Path, patience_s: float = 5.0) -> dict[int, str]:
    """Return the processes in a job's folder that remain after ``patience_s`` seconds, and kill them."""
    until = time.monotonic() + patience_s
    while True:
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # the process has exited
                continue
        if not found or time.monotonic() >= until:
            break
        time.sleep(0.05)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


def judge(done: Done, left: Sequence[str], silent: bool = False) -> tuple[str, str]:
    """Return the verdict on a run, and the reason.

    ``silent``: the launcher's first line may be missing, because its write can be the failed call.
    """
    text = f"{done.out}\n{done.err}"
    if done.code is None:
        return "WRONG", f"hangs for {LIMIT_S:g} s"
    if crash := _CRASH.search(text):
        return "WRONG", f"crash: {crash.group()}"
    if left:
        return "WRONG", f"left behind: {', '.join(left)}"
    ends = dict(_END.findall(done.out))
    if any(total != SUM for total in ends.values()):
        return "WRONG", f"other sums: {ends}"
    foreign = sorted({each for each in raised(done.err) if not each.startswith("allranks.")})
    if foreign:
        return "WRONG", f"exceptions that are not of allranks: {', '.join(foreign)}"
    if done.code == 0:
        return ("right", "") if len(ends) >= 2 else ("WRONG", f"exit code 0, and the ends of {len(ends)} ranks")
    lines = [line for line in done.err.splitlines() if line.startswith(("allranks", "allranks."))]
    if not lines and done.err == "" and silent:
        return "error", "stderr could not be written to"
    return ("error", lines[-1]) if lines else ("WRONG", "no message")


def where(frame: str) -> str:
    match = re.search(r'/([^/"]+)", line (\d+)', frame)
    return f" ({match.group(1)}:{match.group(2)})" if match else ""


def raised(text: str) -> set[str]:
    """Return the final exceptions of the tracebacks of each process, except those raised by the program's own lines."""
    by_process: dict[str, list[str]] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        by_process.setdefault(label.group(1) if label else "", []).append(_LABEL.sub("", line))
    found = set()
    for lines in by_process.values():
        frame, name = "", ""
        inside, before = False, ""
        for line in [*lines, "end"]:
            if line.startswith("Exception ignored"):
                before = line
            if line.startswith("Traceback"):
                inside, name = True, ""
            elif inside and line.startswith("  File "):
                frame = line
            elif inside and line and not line.startswith(" "):
                match = _RAISED.match(line)
                name = match.group(1) if match else line
                inside = False
            elif name and line.startswith(("The above", "During handling")):
                name = ""  # the cause of the next exception
            elif inside and not line.strip() and "signal wakeup fd" in before:
                inside = False  # Python's own message about its own descriptor
            elif name and line and not line.startswith(" "):
                if PROGRAM.name not in frame:
                    found.add(name + where(frame))
                name = ""
        if name and PROGRAM.name not in frame:
            found.add(name + where(frame))
    return found


def report(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Print each WRONG outcome when it is available. Return the number of each verdict."""
    counts: Counter[str] = Counter()
    for number, each in enumerate(outcomes, 1):
        counts[each.verdict] += 1
        if each.verdict == "WRONG":
            print(f"WRONG {each.fault}: {each.reason}", flush=True)
        if number % 100 == 0:
            print(f"{number}: {dict(counts)}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the faults that can be injected")
    parser.add_argument("--sample", type=int, help="inject this number of faults, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="inject faults that begin with this text, for example 'rank0.0 start mmap'")
    parser.add_argument("--first", action="store_true", help="inject only into the first two of repeated calls")
    parser.add_argument("--keep", action="store_true", help="print the output, and keep the files in injection-kept/")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the counts and all wrong results to this file")
    given = parser.parse_args()
    with Injection() as injection:
        faults = injection.faults()
        if given.only:
            faults = [each for each in faults if f"{each} ".startswith(given.only.rstrip() + " ")] or [
                Fault(*(words := given.only.split())[:3], int(words[3]), words[4])
            ]
        if given.first:
            faults = [each for each in faults if each.number <= 2]
        if given.sample:
            faults = random.Random(given.seed).sample(faults, min(given.sample, len(faults)))
        if given.list:
            print(*faults, sep="\n")
            print(f"{len(faults)} faults")
            return 0
        if given.keep:
            for each in faults:
                outcome = injection.run(each, keep=True)
                made = Path("injection-kept", "done")
                told = made.read_text() if made.exists() else ""
                print(f"{each}: {outcome.verdict} {outcome.reason}\n{told}{outcome.output}")
            return 0
        outcomes: list[Outcome] = []
        began = time.monotonic()
        counts = report(outcomes.append(each) or each for each in injection.run_all(faults, given.at_once))
    print(f"{len(outcomes)} faults in {time.monotonic() - began:.0f} s: {dict(counts)}")
    if given.json:
        wrong = [{**asdict(each), "fault": str(each.fault)} for each in outcomes if each.verdict == "WRONG"]
        by_call = {
            call: dict(Counter(each.verdict for each in outcomes if each.fault.call == call))
            for call in sorted({each.fault.call for each in outcomes})
        }
        found = {"faults": len(outcomes), "verdicts": dict(counts), "by call": by_call, "wrong": wrong}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
