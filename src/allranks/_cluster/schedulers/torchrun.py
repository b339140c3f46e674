"""torchrun and launchers that set the same variables of torch.distributed, ``allranks run`` among them."""

from __future__ import annotations

from dataclasses import replace

from allranks._cluster.context import LaunchContext
from allranks._cluster.reading import Environ, Reader, host_of
from allranks._cluster.schedulers.interface import Scheduler

__all__ = ["SCHEDULER"]


def _find_rank(environ: Environ, launcher: bool) -> LaunchContext | None:
    if not environ.get("RANK", "").strip() and not environ.get("WORLD_SIZE", "").strip():
        return None
    if launcher and not environ.get("LOCAL_RANK", "").strip() and environ.get("KUBERNETES_SERVICE_HOST"):
        return None  # the variables number pods, not ranks: see PyTorchJob in ``kubernetes``
    read = Reader(environ, "torchrun")
    for name, kind, meaning in (
        ("TORCHELASTIC_RUN_ID", "torchrun", "torchrun, or a compatible launcher, started this process."),
        ("ALLRANKS_STORE", "allranks", "allranks run started this process. The ranks join through its store."),
    ):
        if read.text(name, meaning):
            read.kind = kind
    read.require("RANK", "WORLD_SIZE")
    size = read.number("WORLD_SIZE", "The number of processes.", 1)
    assert size is not None
    context = LaunchContext(
        read.kind,
        "rank",
        read.number("RANK", "The number of this process.", 0, size - 1),
        size,
        local_rank=read.number("LOCAL_RANK", "Its number on this node."),
        local_size=read.number("LOCAL_WORLD_SIZE", "The number of processes on this node.", 1),
        node=read.number("GROUP_RANK", "The number of this node."),
        nodes=read.number("GROUP_WORLD_SIZE", "The number of nodes.", 1),
        leader=host_of(read.text("MASTER_ADDR", "Host of rank 0.")),
    )
    return replace(context, why=read.why)


SCHEDULER = Scheduler(
    name="torchrun",
    title="torchrun",
    interface=1,
    proof="RANK and WORLD_SIZE",
    kinds=("allranks", "torchrun"),
    rank=_find_rank,
)
