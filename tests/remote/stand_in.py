"""Workers' programs for the tests of how workers come and go."""

from __future__ import annotations

import sys
import time

import torch

from allranks.remote.meet import Post


def serve(post: Post) -> None:
    """Does what single lines ask for, and answers."""
    while said := post.socket.recv(1 << 16):
        verb, *words = said.decode().split()
        if verb == "sleep":
            time.sleep(1000)
        answer = str(torch.get_num_threads()) if verb == "threads" else _group(post, *words)
        post.socket.sendall(answer.encode())


def _group(post: Post, name: str, *ranks: str) -> str:
    try:
        group = post.make_group(name, [int(rank) for rank in ranks], 30.0)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__
    tensor = torch.full((2,), float(post.rank))
    group.all_reduce(tensor)
    return str(tensor.tolist())


def speak(post: Post) -> None:
    """Writes, and fails when the master has ended, which nobody wants to hear of."""
    print("out", post.rank)
    print("err", post.rank, file=sys.stderr)
    post.socket.sendall(b"!")
    post.socket.recv(1)
    raise ValueError("too late")
