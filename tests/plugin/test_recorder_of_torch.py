"""torch's flight recorder (torch 2.15 and later) records calls on groups of allranks if it is enabled."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from allranks.testing import run_ranks

td: Any = torch_dist
_C: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
pytestmark = pytest.mark.skipif(
    not hasattr(td.distributed_c10d, "_maybe_attach_flight_recorder"),
    reason=f"torch {torch.__version__} has no flight recorder for other backends; torch 2.15 or later is needed",
)


def dump() -> Any:
    return json.loads(_C._dump_fr_trace_json(backend="allranks"))


def test_dump_of_flight_recorder_contains_completed_and_pending_calls() -> None:
    def body() -> None:
        group = td.new_group([0, 1], backend="allranks")
        tensor = torch.ones(5)
        td.all_reduce(tensor, group=group)
        td.broadcast(tensor, 0, group=group)
        td.all_gather([torch.empty(5), torch.empty(5)], tensor, group=group)
        td.barrier(group=group)
        other = 1 - td.get_rank()
        if other:
            td.send(tensor, other, group=group)
            late = threading.Thread(target=lambda: td.all_reduce(torch.ones(3), group=group))
            late.start()
            late.join(0.5)
            assert late.is_alive()
            *_, entry = dump()["entries"]
            assert (entry["profiling_name"], entry["input_sizes"]) == ("allranks:all_reduce", [[3]])
            assert not entry["retired"]  # completed calls are retired
            td.send(tensor, other, group=group)
            late.join()
        else:
            td.recv(tensor, other, group=group)
            td.recv(tensor, other, group=group)
            td.all_reduce(torch.ones(3), group=group)
        entries = dump()["entries"]
        names = ["all_reduce", "broadcast", "all_gather", "barrier", "send 0->1" if other else "recv 1<-0"]
        assert [entry["profiling_name"] for entry in entries[:5]] == [f"allranks:{name}" for name in names]
        assert all(entry["retired"] for entry in entries)
        assert "[0, 1]" in [config["ranks"] for config in dump()["pg_config"].values()]

    run_ranks(2, body, env={"TORCH_FR_BUFFER_SIZE": "100"})


PROGRAM = """
import json, os, pickle, sys, time
from pathlib import Path
import torch, torch.distributed as dist

C = torch._C._distributed_c10d
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
tensor = torch.ones(2, 3)
dist.all_reduce(tensor)
dist.broadcast(tensor, 0, group=group)
dist.reduce(tensor, 1)
dist.all_reduce(tensor, group=group, async_op=True).wait()
dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], tensor)
dist.barrier()
def calls(trace):
    return [(*e["process_group"], e["collective_seq_id"], e["profiling_name"], list(e["input_sizes"]), e["retired"])
            for e in trace["entries"]]
def all_retired():
    return all(entry["retired"] for entry in json.loads(C._dump_fr_trace_json())["entries"])
deadline = time.monotonic() + 60
while not all_retired() and time.monotonic() < deadline:  # gloo retires a call in another thread, after it returned
    time.sleep(0.01)
found = calls(json.loads(C._dump_fr_trace_json()))
assert calls(pickle.loads(C._dump_fr_trace(includeStackTraces=False))) == found
assert calls(pickle.loads(C._dump_fr_trace(True, False, False, "gloo"))) == found
frames = pickle.loads(C._dump_fr_trace())["entries"][0]["frames"]
assert any(frame["filename"] == __file__ for frame in frames)
C._dump_fr_trace_file(dist.get_rank())
in_file = calls(pickle.loads(Path(f"{sys.argv[1]}{dist.get_rank()}").read_bytes()))
C._reset_fr_trace()
assert not json.loads(C._dump_fr_trace_json()).get("entries")
print(json.dumps([found, in_file]))
"""


def record(folder: Path, *options: str) -> tuple[Any, Any]:
    """Run the program; return the calls that rank 0 reads from the recorder and from the dumped file."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    prefix = str(folder / "dump_")
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    command = [sys.executable, "-m", "allranks", "run", "-n", "2", *options, str(script), prefix]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[0] [[")]
    found, in_file = json.loads(line.removeprefix("[0] "))
    return found, in_file


def test_record_of_groups_instead_of_gloo_is_the_record_of_gloo(tmp_path: Path) -> None:
    on_gloo, file_of_gloo = record(tmp_path)
    assert len(on_gloo) == 6
    assert file_of_gloo == on_gloo
    on_allranks, in_file = record(tmp_path, "--instead-of-gloo")
    assert on_allranks == on_gloo
    # torch writes the file in C++, with its own name of the backend.
    assert json.loads(json.dumps(in_file).replace("allranks:", "gloo:")) == on_gloo


def test_watcher_does_not_make_calls_use_the_recorder() -> None:
    """``allranks run`` enables torch's recorder for the watcher, which reads no record of allranks."""

    def body() -> None:
        group = td.new_group([0, 1], backend="allranks")
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
        td.all_reduce(torch.ones(1), group=group)
        assert dump().get("entries", []) == []

    run_ranks(2, body, env={"ALLRANKS_WATCH": "1"})
