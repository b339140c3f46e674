"""torch's debug server (torch.distributed.debug) shows the calls of groups of allranks, and those instead of gloo."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.utils._python_dispatch import TorchDispatchMode

import allranks as dist
from allranks.testing import run_ranks

td: Any = torch_dist
_C: Any = torch._C
RECORDS = hasattr(td.distributed_c10d, "_maybe_attach_flight_recorder")
needs_debug = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.debug") is None, reason=f"torch {torch.__version__} has no debug server"
)
needs_pages = pytest.mark.skipif(
    not RECORDS or not all(map(importlib.util.find_spec, ("tabulate", "requests"))),
    reason="needs torch 2.15 or later, tabulate and requests (make newest-torch)",
)

# Both ranks call until rank 0 has fetched a profile and the stacks of its process.
HANDLERS = """
import json, sys, threading, urllib.request
import torch, torch.distributed as dist
import torch.distributed.debug
from torch._C._distributed_c10d import _WorkerServer

dist.init_process_group(sys.argv[1])
server = _WorkerServer("::", 0)
def fetch(handler):
    request = urllib.request.Request(f"http://localhost:{server.port}/handler/{handler}", data=b"", method="POST")
    return urllib.request.urlopen(request, timeout=60).read().decode()
fetched = {}
def fetch_all():
    fetched["profile"] = json.loads(fetch("torch_profile?duration=0.2"))
    fetched["stacks"] = fetch("dump_traceback")
thread = threading.Thread(target=fetch_all)
if dist.get_rank() == 0:
    thread.start()
again = torch.ones(1)
while again.item():
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)
    again.fill_(dist.get_rank() == 0 and thread.is_alive())
    dist.broadcast(again, 0)
if dist.get_rank() == 0:
    thread.join()
    spans = [event["name"] for event in fetched["profile"]["traceEvents"] if ":" in event.get("name", "")]
    print("fetched", json.dumps([sorted(set(spans)), __file__ in fetched["stacks"]]))
dist.barrier()
server.shutdown()
"""

PAGES = """
import os, sys, time, urllib.request
import torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

if __name__ == "__main__":
    _, backend, method, port, folder = sys.argv
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, 5), 0, group=dist.new_group([0, 1]))
    start_debug_server(port=int(port), start_method=method, dump_dir=folder, dump_interval=0.5, fetch_timeout=20)
    dist.barrier()  # all ranks have published their addresses
    if dist.get_rank() == 0:
        def fetch(page):
            while True:
                try:
                    return urllib.request.urlopen(f"http://localhost:{port}{page}", timeout=60).read().decode()
                except ConnectionRefusedError:
                    time.sleep(0.1)
                except urllib.error.URLError as error:
                    if not isinstance(error.reason, ConnectionRefusedError):
                        raise
                    time.sleep(0.1)
        for page in ("fr_trace", "fr_trace_json", "fr_trace?backend=allranks", "stacks"):
            with open(f"{folder}/{page}.page", "w") as file:
                file.write(fetch("/" + page))
        # The first dump may lack ranks, and the last file may be incomplete.
        while sum(name.startswith("fr_trace_2") for name in os.listdir(folder)) < 3:
            time.sleep(0.1)
    dist.barrier()
    if dist.get_rank() == 0:
        stop_debug_server()
    dist.barrier()
"""


def run(folder: Path, program: str, *args: str, instead: bool) -> str:
    script = folder / "program.py"
    script.write_text(program)
    options = ["--instead-of-gloo"] if instead else []
    command = [sys.executable, "-m", "allranks", "run", "-n", "2", *options, str(script), *args]
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_debug
@pytest.mark.parametrize(("backend", "instead"), [("allranks", False), ("gloo", True)])
def test_handlers_of_a_rank_return_calls_and_stacks(backend: str, instead: bool, tmp_path: Path) -> None:
    printed = run(tmp_path, HANDLERS, backend, instead=instead)
    (fetched,) = re.findall(r"^\[0\] fetched (.*)$", printed, re.MULTILINE)
    spans, has_stack = json.loads(fetched)
    assert {f"{backend}:all_reduce", f"{backend}:broadcast", "c10d::allreduce_", "c10d::broadcast_"} <= set(spans)
    assert has_stack


@needs_pages
@pytest.mark.parametrize(("backend", "instead", "method"), [("allranks", False, "spawn"), ("gloo", True, "fork")])
def test_pages_show_the_recorded_calls(backend: str, instead: bool, method: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    run(tmp_path, PAGES, backend, method, str(port), str(tmp_path), instead=instead)

    def calls(page: str) -> Counter[str]:
        return Counter(re.findall(r"\w+:(?:all_reduce|broadcast)", (tmp_path / f"{page}.page").read_text()))

    own = "fr_trace" if instead else "fr_trace?backend=allranks"
    assert calls(own).keys() == {f"{backend}:all_reduce", f"{backend}:broadcast"}
    assert calls("fr_trace?backend=allranks").keys() == {"allranks:all_reduce", "allranks:broadcast"}
    assert "stacks" in (tmp_path / "stacks.page").read_text().lower()
    dumped = sorted(tmp_path.glob("fr_trace_2*"))[1].read_text()
    assert ("gloo:broadcast" in dumped) is instead
    if instead:
        assert calls("fr_trace_json") == {"gloo:all_reduce": 2, "gloo:broadcast": 2}  # of two ranks


class Nothing(TorchDispatchMode):
    """A dispatch mode: while it is active, calls use torch's operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_call_is_unharmed_by_a_profiler_that_starts_in_another_thread() -> None:
    """Start a profiler of all threads while a call waits, as the debug server does."""

    def body() -> None:
        group = dist.torch_group()
        tensor = torch.ones(1)
        if group.rank() == 0:
            profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                experimental_config=_C._profiler._ExperimentalConfig(profile_all_threads=True),
            )
            called = threading.Event()

            def record() -> None:
                with profile:
                    td.send(torch.ones(1), 1)  # the other rank then joins the call
                    called.wait()

            recorder = threading.Thread(target=record)
            with Nothing():
                recorder.start()
                td.all_reduce(tensor)
            td.broadcast(tensor, 0)
            called.set()
            recorder.join()
            assert "allranks:broadcast" in [event.key for event in profile.key_averages()]
        else:
            td.recv(torch.empty(1), 0)
            td.all_reduce(tensor)
            td.broadcast(tensor, 0)
        assert tensor.item() == 2

    run_ranks(2, body)
