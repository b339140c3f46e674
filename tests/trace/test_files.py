"""Trace files from Python, ALLRANKS_TRACE and ``allranks run --trace``, with forks, restarts and a full disk."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch

import allranks as dist
from allranks._trace.files import open_trace, trace_files
from allranks._trace.reader import TraceError
from allranks.testing import run_ranks

CALLS = """
import os, torch, allranks as dist
dist.init_process_group()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
"""


def titles(path):
    return [call.title for call in open_trace(path).calls() if not call.purpose]


def test_record_writes_one_file_per_rank(tmp_path):
    def body():
        dist.all_reduce(torch.ones(2))
        with dist.trace.record(tmp_path / "deep" / "traces") as file:
            dist.barrier()
            dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))
        return file

    for rank, file in enumerate(run_ranks(2, body)):
        assert file == tmp_path / "deep" / "traces" / f"rank-{rank}.trace"
        assert file.stat().st_size < 1 << 20  # truncated after the last call
        reader = open_trace(file)
        assert (reader.identity.rank, reader.identity.world_size) == (rank, 2)
        calls = list(reader.calls())
        assert [(c.verb, c.count) for c in calls if not c.purpose] == [("barrier", 0), ("all_reduce", 3)]
        assert all(c.returned_ns for c in calls)
        assert {group.ranks for group in reader.groups().values()} == {(0, 1)}


def test_second_record_keeps_the_first_file(tmp_path):
    def body():
        names = []
        for number in (1, 2):
            with dist.trace.record(tmp_path) as file:
                for _ in range(number):
                    dist.barrier()
            names.append(file.name)
        return names

    assert run_ranks(1, body) == [["rank-0.trace", "rank-0.1.trace"]]
    assert [len(titles(path)) for path in trace_files([tmp_path])] == [1, 2]


def test_record_to_unusable_path_or_twice_is_refused(tmp_path):
    (tmp_path / "file").touch()

    def body():
        found = []
        for path in (tmp_path / "file", "/proc/self/none"):
            with pytest.raises(dist.UsageError) as error, dist.trace.record(path):
                pass
            found.append(str(error.value))
        with dist.trace.record(tmp_path), pytest.raises(dist.UsageError) as error, dist.trace.record(tmp_path):
            pass
        found.append(str(error.value))
        with dist.trace.record(tmp_path):  # the refused calls have left no open recording
            pass
        return found

    ((file, proc, twice),) = run_ranks(1, body)
    assert file.startswith(f"cannot record calls in '{tmp_path}/file': File exists.\n  Use a folder")
    assert proc.startswith("cannot record calls in '/proc/self/none': ")
    assert twice.startswith(f"calls are already recorded in '{tmp_path}/rank-0.trace'")
    assert len(trace_files([tmp_path])) == 2


def test_record_needs_a_group_and_enabled_recording(tmp_path):
    def early():
        with pytest.raises(dist.NotInitializedError, match="before the first group"), dist.trace.record(tmp_path):
            pass

    def body():
        with pytest.raises(dist.UsageError, match="ALLRANKS_RECORD=0"), dist.trace.record(tmp_path):
            pass

    run_ranks(1, early, init=False)
    run_ranks(1, body, env={"ALLRANKS_RECORD": "0"})
    assert list(tmp_path.iterdir()) == []


def test_forked_child_does_not_change_the_file(tmp_path):
    def body():
        with dist.trace.record(tmp_path):
            dist.barrier()
            child = [sys.executable, "-c", ""]
            subprocess.run(child, check=True)
            pid = os.fork()
            if pid == 0:
                from allranks._trace import memory

                memory._file.stop()
                memory._file = memory._recorder = None  # equivalent to the exit of an interpreter
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            for _ in range(40_000):  # more calls than one extension of the file holds
                dist.barrier()

    run_ranks(2, body)
    assert [len(titles(path)) for path in trace_files([tmp_path])] == [40_001] * 2


def test_launcher_records_all_ranks(tmp_path, command):
    (tmp_path / "calls.py").write_text(CALLS)
    for twice in (False, True):
        done = command("run", "-n", "2", "--trace", "traces", "calls.py")
        said = "allranks run: --trace traces: the folder has files of another job. A timeline of it shows both jobs."
        assert (done.returncode, done.stderr.startswith(said), bool(done.stderr)) == (0, twice, twice)
    found = trace_files([tmp_path / "traces"])
    assert [path.name for path in found] == ["rank-0.trace", "rank-0.1.trace", "rank-1.trace", "rank-1.1.trace"]
    for path in found:
        assert titles(path) == ["all_reduce #1", "all_reduce #2", "all_reduce #3"]
        assert path.stat().st_size < 1 << 20


def test_unusable_trace_folder_is_reported(tmp_path, command):
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "file").write_text("")
    done = command("run", "-n", "2", "--trace", "file", "calls.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "allranks run: error: cannot create 'file' (--trace): File exists\n"
    done = command("run", "-n", "1", "calls.py", ALLRANKS_TRACE="file")  # the job continues
    assert done.returncode == 0
    assert "rank 0: ALLRANKS_TRACE: cannot record calls in 'file': File exists.\n" in done.stderr


def test_trace_file_of_killed_rank_keeps_its_calls(tmp_path, command):
    (tmp_path / "calls.py").write_text(CALLS + "if dist.get_rank() == 1: os.kill(os.getpid(), 9)\ndist.barrier()\n")
    done = command("run", "-n", "2", "--restarts", "1", "--trace", "traces", "calls.py")
    assert done.returncode == 128 + signal.SIGKILL
    found = trace_files([tmp_path / "traces"])
    assert [path.name for path in found] == ["rank-0.trace", "rank-0.1.trace", "rank-1.trace", "rank-1.1.trace"]
    assert [len(titles(path)) for path in found] == [4, 4, 3, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system requires root")
def test_full_disk_ends_only_the_recording(tmp_path):
    disk = tmp_path / "small disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=False).returncode:
        pytest.skip("cannot mount a file system")
    try:
        code = CALLS.replace("range(3)", "range(70_000)")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "ALLRANKS_TRACE": str(disk)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0
        assert done.stderr == (
            f"the disk is full: {disk}/rank-0.trace has the first 32768 of 70000 calls.\n"
            "  Use a folder on a disk with more space.\n"
        )
        assert len(titles(disk / "rank-0.trace")) == 32768
    finally:
        subprocess.run(["umount", disk], check=True)


def test_non_trace_file_is_refused(tmp_path):
    for name, data in {"empty": b"", "text": b"x" * 5000, "short": b"allrtrc\0"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match=f"{shlex.quote(str(tmp_path / name))} is not a trace of allranks"):
            open_trace(tmp_path / name)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(TraceError, match=f"cannot read {path}: "):
            open_trace(path)
    with pytest.raises(TraceError, match="has no trace files"):
        trace_files([tmp_path])
