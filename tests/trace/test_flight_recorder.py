"""Dumps in the format of torch's Flight Recorder: the tool of torch reads them and names missing ranks."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from test_timeline import MS, call, process

import allranks as dist
from allranks._trace import flight_recorder
from allranks.testing import run_ranks
from support import warm

BEGIN = """
import os, time, torch, allranks as dist
dist.init_process_group(timeout=3)
rank = dist.get_rank()
for i in range(3):
    dist.all_reduce(torch.ones(4))
"""
ENDS = {
    "mismatch": "dist.all_reduce(torch.ones(4 + (rank == 2)))\n",
    "another verb": "dist.barrier() if rank == 2 else dist.all_reduce(torch.ones(4))\n",
    "missing": "time.sleep(5) if rank == 2 else dist.all_reduce(torch.ones(4))\n",
    "dead": "os.kill(os.getpid(), 9) if rank == 2 else dist.all_reduce(torch.ones(4))\n",
    "group": "g = dist.new_group([2, 0])\nif rank == 0: dist.barrier(g)\nif rank == 2: time.sleep(5)\n",
    "message": "if rank == 1: dist.recv(torch.ones(3), 2)\nif rank == 2: time.sleep(5)\n",
}


def torchfrtrace(folder):
    """Run the tool of torch. Return its output, the missing ranks, the ranks that differ, and its database."""
    words = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-o", f"{folder}.db"]
    done = warm.run([sys.executable, *words], check=True)
    with open(f"{folder}.db", "rb") as file:
        _, database = pickle.load(file)
    missing = [each.missing_ranks for each in database.collectives if each.missing_ranks]
    differ = [set(each.mismatch_collectives) for each in database.collectives if each.mismatch_collectives]
    return done.stdout + done.stderr, missing, differ, database


@pytest.mark.parametrize("end", ENDS)
def test_torch_tool_names_the_culprit_rank(command, tmp_path, end):
    (tmp_path / "train.py").write_text(BEGIN + ENDS[end])
    command("run", "-n", "3", "--trace", "traces", "train.py", "-q")
    done = command("trace", "flight", "traces", "-o", "dumps")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("next: torchfrtrace dumps\n")
    said, missing, differ, database = torchfrtrace(tmp_path / "dumps")
    if end in ("mismatch", "another verb"):
        assert (missing, differ) == ([], [{2}])
        assert "Culprit rank 2" in said
    else:
        assert (missing, differ) == ([{2}], [])
    assert len([each for each in database.collectives if each.pass_check and not each.missing_ranks]) >= 3


def test_torch_tool_finds_no_error_in_correct_program(command, tmp_path):
    calls = """
t = lambda n: torch.ones(n)
for _ in range(2):
    dist.all_gather([t(5) for _ in range(3)], t(5)); dist.all_gather_into_tensor(t(15), t(5))
    dist.reduce_scatter(t(5), [t(5) for _ in range(3)]); dist.reduce_scatter_tensor(t(5), t(15))
    dist.gather(t(5), [t(5) for _ in range(3)] if rank == 0 else None)
    dist.scatter(t(5), [t(5)] * 3 if rank == 0 else None)
    dist.all_to_all_single(t(6), t(6)); dist.broadcast(t(5), 1); dist.reduce(t(5), 2); dist.barrier()
    for i in range(3):
        works = [dist.isend(t(i), (rank + 1) % 3, tag=i), dist.irecv(t(i), (rank + 2) % 3, tag=i)]
        [work.wait() for work in works]
    dist.all_gather_object([None] * 3, rank)
pair = dist.new_group([2, 1])
if rank: dist.all_reduce(t(3), group=pair)
if rank == 0: dist.recv(t(1))
if rank == 1: dist.send(t(1), 0)
"""
    (tmp_path / "train.py").write_text(BEGIN + calls)
    done = command("run", "-n", "3", "--trace", "traces", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    done = command("trace", "flight", "traces", "-o", "dumps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"left_out": 6' in done.stdout  # receives of rank 0 without a tag, and the matching sends
    said, missing, differ, database = torchfrtrace(tmp_path / "dumps")
    assert (missing, differ) == ([], []), said
    assert len(database.collectives) > 40


def test_dump_has_same_fields_as_dump_of_torch(tmp_path):
    def body():
        dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)
        path = dist.trace.flight_dump(tmp_path / "dumps")
        with pytest.raises(dist.UsageError, match="cannot write to '/proc/none'"):
            dist.trace.flight_dump("/proc/none")
        return path.name

    assert run_ranks(2, body) == ["allranks_trace_rank_0", "allranks_trace_rank_1"]
    content = pickle.loads((tmp_path / "dumps" / "allranks_trace_rank_1").read_bytes())
    (entry,) = (e for e in content["entries"] if e["profiling_name"] == "gloo:all_reduce")
    assert (entry["input_sizes"], entry["input_dtypes"], entry["state"]) == ([[6]], ["Float"], "completed")
    theirs = torchs_own(tmp_path)
    assert content.keys() == theirs.keys()
    assert entry.keys() == theirs["entries"][0].keys()
    assert content["version"] == theirs["version"]
    assert {type(v) for v in content["pg_status"].values()} == {dict}
    for name in ("pg_config", "pg_status"):
        ((_, one), (_, other)) = (next(iter(each[name].items())) for each in (content, theirs))
        assert one.keys() == other.keys()


def torchs_own(folder):
    """Return the dump that torch writes for one call on gloo."""
    code = f"""
import torch, torch.distributed as td
td.init_process_group("gloo", init_method="file://{folder}/meet", rank=0, world_size=1)
td.all_reduce(torch.ones(6))
open("{folder}/torchs", "wb").write(torch._C._distributed_c10d._dump_fr_trace())
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}, check=True)
    return pickle.loads((folder / "torchs").read_bytes())


def test_flight_dump_without_group_raises(tmp_path):
    def body():
        with pytest.raises(dist.NotInitializedError, match="no calls are available"):
            dist.trace.flight_dump(tmp_path)

    run_ranks(1, body, init=False)


def test_ranks_without_their_first_calls_are_aligned(tmp_path):
    calls = [
        [call(i, "barrier", i * MS, i * MS + 9) for i in range(first, 30 - rank)] for rank, first in ((0, 1), (1, 12))
    ]
    ranks = [process(0, 0, calls[0]), process(1, 1, calls[1])]
    ranks[1] = ranks[1].__class__(**{**vars(ranks[1]), "missing": 11})
    for dump, whose in flight_recorder.dumps(ranks).values():
        flight_recorder.write(tmp_path / "dumps", dump, whose)
    _, missing, differ, database = torchfrtrace(tmp_path / "dumps")
    assert (missing, differ) == ([{1}], [])
    assert [c.collective_seq_id for c in database.collectives] == list(range(12, 30))


@pytest.mark.parametrize(
    ("name", "says"), [("none", "cannot read none: "), ("text", "text is not a trace of allranks")]
)
def test_what_is_refused(command, tmp_path, name, says):
    (tmp_path / "text").write_text("x" * 1000)
    done = command("trace", "flight", name, "-o", "dumps")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"allranks trace flight: error: {says}")
    assert done.stderr.count("\n") <= 2  # what failed, and the action
    assert not (tmp_path / "dumps").exists()
