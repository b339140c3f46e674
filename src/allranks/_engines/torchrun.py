"""The store that torchrun's agent serves, for ranks that torchrun started.

The agent holds MASTER_PORT itself, so rank 0 cannot listen there: the ranks meet on what the agent serves, which
speaks torch's protocol. Hence torch's own client, wrapped by ``_store.ForeignStore``. It has no secret: whoever
reaches the port can write, as in every job of torchrun.

This stands here and not in ``_rendezvous``, which the launcher imports and which therefore may not import torch,
not even through another module: it loads this one by its name, at the moment when torchrun turns out to be there.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = ["connect"]


def connect(host: str, port: int, timeout_s: float, patience_s: float) -> Any:
    """Connects to the agent's store.

    Args:
        host: where the agent is (MASTER_ADDR).
        port: where it listens (MASTER_PORT).
        timeout_s: how long to try.
        patience_s: how long the store may take for one request afterwards.

    Raises:
        RuntimeError: torch's; nobody answered in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(timedelta(seconds=patience_s))
    return store
