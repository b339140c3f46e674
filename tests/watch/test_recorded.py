"""Calls from a dump of torch's Flight Recorder: constructed dumps, and a dump of this torch as the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks._watch.recorded import FlightGroup, group_states, in_progress, read_dump

pytestmark = pytest.mark.quick

WORLD = FlightGroup("0", "", (0, 1, 2, 3), "gloo")
PAIR = FlightGroup("7", "mesh_tp", (1, 3), "nccl")
GROUPS = {group.name: group for group in (WORLD, PAIR)}
API = "/x/site-packages/torch/distributed/distributed_c10d.py"


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": 1_000_000_000,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        "thread_id": "17",
        "frames": [
            {"name": "all_reduce", "filename": API, "line": 1},
            {"name": "wrapper", "filename": API.replace("distributed_c10d", "c10d_logger"), "line": 2},
            {"name": "step", "filename": "/home/me/train.py", "line": 12},
        ],
    } | more


def read(*entries: dict[str, Any]) -> list[Any]:
    return read_dump({"entries": entries}, GROUPS, wall_ns=3_500_000_000, now=100.0)


def test_collective_of_gloo() -> None:
    (call,) = read(entry(5))
    state = call.state
    assert (state.title, state.verb, state.group, state.ranks, state.number) == (
        "all_reduce #5",
        "all_reduce",
        "",
        (0, 1, 2, 3),
        5,
    )
    assert (state.count, state.dtype, state.site) == (6, "float32", "/home/me/train.py:12 in step")
    assert (state.seconds, state.began, state.ended, call.thread) == (2.5, 97.5, False, 17)
    assert call.on_device == ""


def test_function_that_the_program_called_names_the_call() -> None:
    inner = {"name": "all_gather", "filename": API, "line": 1}
    outer = {"name": "all_gather_object", "filename": API, "line": 2}
    own = {"name": "log", "filename": "/home/me/train.py", "line": 3}
    (call,) = read(entry(5, profiling_name="gloo:allgather", frames=[inner, outer, own]))
    assert (call.state.title, call.state.verb) == ("all_gather_object #5", "all_gather")
    (call,) = read(entry(5, profiling_name="nccl:_allgather_base", frames=[own]))  # DistributedDataParallel, FSDP
    assert call.state.title == "all_gather_into_tensor #5"
    assert read(entry(5, frames=[]))[0].state.site == ""


def test_message_of_nccl_has_its_peer() -> None:
    pair = {"process_group": ("7", "mesh_tp"), "is_p2p": True, "collective_seq_id": 9}
    (call,) = read(entry(1, profiling_name="nccl:recv 0<-1", **pair))
    assert (call.state.title, call.state.peer, call.state.number) == ("recv from rank 3", 3, 0)
    (call,) = read(entry(1, profiling_name="nccl:send 1->0", **pair))
    assert (call.state.title, call.state.peer) == ("send to rank 1", 1)


def test_ended_calls_count_for_the_last_number_of_their_group() -> None:
    calls = read(entry(5, retired=True), entry(6, state="completed"), entry(7), entry(8, process_group=("9", "other")))
    assert [call.state.number for call in in_progress(calls)] == [7]
    assert {(group.name, group.number) for group in group_states(calls, GROUPS)} == {("", 7), ("mesh_tp", 0)}


def test_call_on_a_gpu_has_the_state_of_its_stream() -> None:
    gpu = {"process_group": ("7", "mesh_tp"), "profiling_name": "nccl:all_reduce"}
    assert [call.on_device for call in read(entry(1, state="started", **gpu), entry(2, **gpu))] == [
        "started",
        "scheduled",
    ]


PROGRAM = """
import os, sys, threading, time, torch, torch.distributed as dist
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.barrier()
from allranks._watch import evidence
calls = evidence.read_dump(evidence._dump(), evidence.torch_groups(), time.time_ns(), time.monotonic())
print([(c.state.title, c.state.ended, c.state.count, c.state.site) for c in calls])
print(evidence._status(), "torch._inductor" in sys.modules, hasattr(torch, "_inductor"))
"""


def test_dump_of_this_torch_is_read_and_imports_no_compiler(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"ALLRANKS_WATCH": "0"},
    )
    first, second = done.stdout.splitlines()
    assert first.startswith(f"[('all_reduce #1', True, 3, '{program}:5 in <module>')")
    assert "('barrier #2', True, " in first
    assert second.startswith("{} False ")
