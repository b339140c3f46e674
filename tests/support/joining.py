"""A rank as a separate process that joins, leaves, and prints its results as JSON. It does not need torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from allranks._rendezvous import rendezvous

SECRET = "0123456789abcdef"
SRC = str(Path(rendezvous.__file__).parents[2])

RANK = """
import json, os, sys, time
from allranks._rendezvous.rendezvous import join
url, rank, size, timeout_s, rounds = json.loads(sys.argv[1])
began = time.monotonic()
answer = {"pid": os.getpid()}
try:
    for _ in range(rounds):
        meeting = join(url, rank=rank, world_size=size, timeout_s=timeout_s)
        assert meeting.store.add("n", 1) <= meeting.world_size, "keys of an earlier meeting"
        answer |= {"rank": meeting.rank, "size": meeting.world_size, "members": [m.pid for m in meeting.members]}
        answer |= {"local": [meeting.local_rank, meeting.local_world_size]}
        meeting.close()
except Exception as error:
    answer |= {"error": type(error).__name__, "text": str(error)}
answer["took"] = time.monotonic() - began
print(json.dumps(answer))
"""


class Rank:
    """A process that joins and leaves ``rounds`` times and prints its results."""

    def __init__(
        self,
        url: str | None,
        rank: int = -1,
        size: int = -1,
        timeout_s: float = 20.0,
        rounds: int = 1,
        **environ: object,
    ) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        given = {"ALLRANKS_SECRET": SECRET, "PYTHONPATH": SRC} | {name: str(value) for name, value in environ.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RANK, json.dumps([url, rank, size, timeout_s, rounds])],
            env=kept | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=60.0)
        assert out, err
        return {**json.loads(out), "stderr": err}


def answers(*ranks: Rank) -> list[dict[str, Any]]:
    return [rank.answer() for rank in ranks]


def assert_met(*ranks: Rank) -> None:
    told = answers(*ranks)
    for number, answer in enumerate(told):
        assert "error" not in answer, answer
        assert answer["rank"] == number
        assert answer["size"] == len(ranks)
        assert answer["members"] == [other["pid"] for other in told]
        assert answer["local"] == [number, len(ranks)]
        assert answer["stderr"] == ""
