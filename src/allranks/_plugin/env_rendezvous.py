"""torch.distributed's env:// in an elastic job: the launcher's store, in place of a TCPStore in rank 0.

Such a store would be lost with rank 0, and a process that takes a place would find what those before it left there.
torch has one handler for env://, which is replaced by one that looks first whether the job is elastic.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from allranks._cluster.outer_job import leave_outer_job

__all__ = ["serve_elastic_jobs"]


def serve_elastic_jobs() -> None:
    """Replaces torch's handler."""
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
    torchs = handlers.get("env")
    if torchs is None:
        return  # a torch of later years: programs without --elastic must not notice

    def env(url: str, timeout: timedelta = timedelta(minutes=30), **named: Any) -> Iterator[tuple[Any, int, int]]:
        leave_outer_job(os.environ)
        if os.environ.get("ALLRANKS_ELASTIC") != "1":
            yield from torchs(url, timeout=timeout, **named)
            return
        from allranks._engines.c10d.store import BoardStore  # torch is loaded by programs without any rank, too
        from allranks._rendezvous.rendezvous import elastic_board

        board = elastic_board(None, timeout_s=timeout.total_seconds())
        if board is None:
            yield from torchs(url, timeout=timeout, **named)
            return
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(name) or os.environ[name.upper()]) for name in ("rank", "world_size"))
        yield BoardStore(board, timeout.total_seconds()), rank, size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")  # torch's words

    handlers["env"] = env
