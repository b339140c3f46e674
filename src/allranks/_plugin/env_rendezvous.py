"""torch.distributed's env:// in an elastic job: the launcher's store instead of a TCPStore in rank 0.

A TCPStore in rank 0 would be lost with rank 0, and a replacement process would find the keys of its predecessors in it.
torch has one handler for env://. This module replaces it by a handler that first checks whether the job is elastic.
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
    """Replace torch's handler."""
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
    torchs = handlers.get("env")
    if torchs is None:
        return  # an unknown future version of torch: programs without --elastic must not be affected

    def env(url: str, timeout: timedelta = timedelta(minutes=30), **named: Any) -> Iterator[tuple[Any, int, int]]:
        leave_outer_job(os.environ)
        if os.environ.get("ALLRANKS_ELASTIC") != "1":
            yield from torchs(url, timeout=timeout, **named)
            return
        from allranks._elastic.membership_store import MembershipStore
        from allranks._elastic.torch_store import ElasticStore  # late: programs that are not a rank load torch, too

        membership = MembershipStore.of_elastic_job(None, timeout_s=timeout.total_seconds())
        if membership is None:
            yield from torchs(url, timeout=timeout, **named)
            return
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(name) or os.environ[name.upper()]) for name in ("rank", "world_size"))
        yield ElasticStore(membership, timeout.total_seconds()), rank, size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")  # torch's error text

    handlers["env"] = env
