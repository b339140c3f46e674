"""torch's flight recorder (torch 2.15 and later) records calls on groups of allranks if it is enabled."""

import json
import threading
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
