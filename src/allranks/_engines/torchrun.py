"""The store that torchrun's agent serves, for ranks that torchrun started.

The agent itself holds MASTER_PORT, so rank 0 cannot listen there. The ranks meet on the agent's store, which uses
torch's protocol. This module therefore uses torch's own client, wrapped by ``_store.ForeignStore``. The store has no
secret: any process that reaches the port can write to it, as in every torchrun job.

This module is not in ``_rendezvous``, because the launcher imports that package. The launcher must not import torch,
not even through another module. ``_rendezvous`` loads this module by name when it detects torchrun.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = ["connect"]


def connect(host: str, port: int, timeout_s: float, patience_s: float) -> Any:
    """Connect to the agent's store.

    Args:
        host: The host of the agent (MASTER_ADDR).
        port: The port of the agent (MASTER_PORT).
        timeout_s: Seconds to try to connect.
        patience_s: Seconds that the store may take for one later request.

    Raises:
        RuntimeError: torch's error. The agent did not answer in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(timedelta(seconds=patience_s))
    return store
