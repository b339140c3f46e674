"""`allranks.nn.parallel.DistributedDataParallel`: where users of torch.nn.parallel look for it."""

from __future__ import annotations

from typing import NoReturn

from allranks.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

# torch's for one process that commands several devices.
_OF_ONE_PROCESS = ("DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter")


def __getattr__(name: str) -> NoReturn:
    if name in _OF_ONE_PROCESS:
        raise AttributeError(
            f"allranks.nn.parallel.{name} comes with the master-worker mode, which this version does not have; "
            "DistributedDataParallel trains with a process per rank"
        )
    raise AttributeError(f"module 'allranks.nn.parallel' has no attribute {name!r}")
