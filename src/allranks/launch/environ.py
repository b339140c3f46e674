"""What a rank's environment says: who it is, as torchrun says it, and how many threads it may use.

Reading these variables is ``allranks._env``'s work. A port is only named here, never held: nobody of ours listens
on TCP; an unmodified torch.distributed script on rank 0 binds it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping

from allranks._host import usable_cpus

__all__ = ["common_environ", "place_environ", "threads_per_rank"]

# Left over from a job that this job is started from; they would lead torch to that job's agent.
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


def threads_per_rank(nproc: int, threads: int | None, environ: Mapping[str, str]) -> str:
    """OMP_NUM_THREADS for a rank: the option, else the user's own setting, else a fair share of the CPUs."""
    if threads is not None:
        return str(threads)
    return environ.get("OMP_NUM_THREADS") or str(max(1, usable_cpus() // nproc))


def common_environ(environ: Mapping[str, str], nproc: int, threads: int | None, store: str) -> dict[str, str]:
    """The environment that all ranks share.

    Args:
        environ: the launcher's own.
        nproc: number of ranks.
        threads: threads per rank; None to decide.
        store: address of the launcher's store.
    """
    return {name: value for name, value in environ.items() if name not in _FOREIGN} | {
        "OMP_NUM_THREADS": threads_per_rank(nproc, threads, environ),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "ROLE_WORLD_SIZE": str(nproc),
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "ALLRANKS_STORE": store,
    }


def place_environ(rank: int) -> dict[str, str]:
    """What differs from rank to rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
