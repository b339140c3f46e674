"""Worker programs for the tests of worker startup and exit."""

from __future__ import annotations

import sys
import time

import torch

from allranks.remote.bootstrap.worker_context import WorkerContext


def serve(context: WorkerContext) -> None:
    """Execute the commands received as single lines, and send the results."""
    while said := context.socket.recv(1 << 16):
        verb, *words = said.decode().split()
        if verb == "sleep":
            time.sleep(1000)
        answer = str(torch.get_num_threads()) if verb == "threads" else _group(context, *words)
        context.socket.sendall(answer.encode())


def _group(context: WorkerContext, name: str, *ranks: str) -> str:
    try:
        group = context.make_group(name, [int(rank) for rank in ranks], 30.0)
    except Exception as error:  # noqa: BLE001 - the test checks the error type
        return type(error).__name__
    tensor = torch.full((2,), float(context.rank))
    group.all_reduce(tensor)
    return str(tensor.tolist())


def speak(context: WorkerContext) -> None:
    """Print to both streams, and raise after the master has exited. The master must not report this error."""
    print("out", context.rank)
    print("err", context.rank, file=sys.stderr)
    context.socket.sendall(b"!")
    context.socket.recv(1)
    raise ValueError("too late")
