"""Two jobs with one folder: the first job keeps it until its processes have exited, and no checkpoint is lost.

The jobs are processes that save on request, in turn. If the file system has no locks, which a process simulates with a
failing ``flock``, the record of the job decides.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks import checkpoint
from allranks.checkpoint import folder_claims, folders

JOB = """
import errno, fcntl, os, socket, sys, time, warnings
folder, host, locks = sys.argv[1:]
if locks == "without":
    def flock(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = flock
if host:
    socket.gethostname = lambda: host
from allranks import checkpoint
for line in sys.stdin:
    if line == "fork\\n":
        pid = os.fork()
        if not pid:
            time.sleep(1000)
        print(pid, flush=True)
        continue
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint.save({"from": os.getpid()}, folder, step=int(line), keep=1)
            print("saved", *(each.message for each in caught), flush=True)
        except Exception as error:
            print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
"""


class Job:
    """Process that saves on request."""

    def __init__(self, folder: Path, run: str, host: str, locks: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, folder, host, locks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHELASTIC_RUN_ID": run},
        )

    def tell(self, line: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Jobs(contextlib.ExitStack):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def start(self, run: str, host: str = "", locks: str = "with") -> Job:
        job = Job(self.folder, run, host, locks)
        self.callback(job.kill)
        return job

    def steps(self) -> list[int]:
        return [info.step for info in checkpoint.list(self.folder)]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with Jobs(tmp_path) as found:
        yield found


@pytest.mark.parametrize("locks", ["with", "without"])
def test_first_job_keeps_the_folder_until_it_exits(jobs: Jobs, locks: str) -> None:
    """Check that the job keeps the folder between saves.

    A restart of the job continues immediately. Another job can save immediately after the first job has exited.
    """
    first, second = (jobs.start(run, locks=locks) for run in ("one", "two"))
    assert first.tell(1) == "saved"
    for step in (2, 3):
        words = second.tell(step)
        assert words.startswith("UsageError checkpoint.save: another job")
        assert f"pid {first.process.pid}, run 'one', since 20" in words
        assert f"saves into {jobs.folder} until its processes have exited" in words
    assert first.tell(4) == "saved"
    again = jobs.start("one", locks=locks)
    assert again.tell(5) == "saved"
    worker = int(first.tell("fork"))
    try:
        first.kill()
        assert jobs.steps() == [5]
        assert "run 'one'" in second.tell(6)  # the restarted process of job 'one' is alive
        again.kill()
        assert second.tell(7) == "saved"  # its forked worker is alive, but does not save
    finally:
        os.kill(worker, 9)
    # without locks, step 5 stays because it belongs to another job
    assert jobs.steps() == ([7] if locks == "with" else [7, 5])
    assert second.tell(8) == "saved"
    assert jobs.steps() == ([8] if locks == "with" else [8, 5])


def test_second_job_on_another_host_without_locks_is_warned(jobs: Jobs) -> None:
    """The second job cannot detect whether the first one runs: it gets a warning, and the first job an error."""
    first, second = (jobs.start(run, host, "without") for run, host in (("one", "here"), ("two", "there")))
    assert first.tell(1) == "saved"
    words = second.tell(2)
    assert words.startswith("saved")
    assert "step 2 is complete" in words
    assert f"host here, pid {first.process.pid}, run 'one'" in words
    assert "has no locks, so allranks cannot detect whether that job still runs" in words
    for step in (3, 4):
        assert f"host there, pid {second.process.pid}, run 'two'" in first.tell(step)
    assert second.tell(5) == "saved"
    assert jobs.steps() == [5, 1]


def test_folder_without_its_job_record_can_be_claimed_again(tmp_path: Path, jobs: Jobs) -> None:
    first, second = (jobs.start(run) for run in ("one", "two"))
    assert first.tell(1) == "saved"
    (tmp_path / ".job").unlink()
    assert second.tell(2) == "saved"
    assert "run 'two'" in first.tell(3)


def test_processes_of_a_job_have_the_same_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ID comes from the launcher, else from a rank that has one, else from rank 0."""
    monkeypatch.setattr(folder_claims, "_run", "")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert folder_claims.agreed_run_id() == ""
    alone = folder_claims.run_id()
    assert alone == folder_claims.run_id()
    folder_claims.agree_on_run_id([("", "zero"), ("", alone)])
    assert folder_claims.run_id() == folder_claims.agreed_run_id() == "zero"
    folder_claims.agree_on_run_id([("", "new"), ("zero", "zero")])
    assert folder_claims.run_id() == "zero"


def test_tidy_reports_a_missing_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-0000000001").mkdir()
    told = folders.tidy(tmp_path / "step-0000000002", 1, None)
    assert told == [f"{tmp_path / 'step-0000000002'} no longer exists: another program has removed it"]
    assert (tmp_path / "step-0000000001").is_dir()


def test_merge_releases_the_folder(tmp_path: Path) -> None:
    with folders.hold_folder(tmp_path, "a merge", stays=False) as held:
        assert held == folders.HeldFolder("", [])
    with folders.hold_folder(tmp_path, "another"):
        pass
    folder_claims.release(tmp_path)
