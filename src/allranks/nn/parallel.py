"""The names of torch.nn.parallel: training of a module by all ranks, or by all workers of a master."""

from __future__ import annotations

from allranks.parallel import DataParallel, DistributedDataParallel
from allranks.remote.data_parallel import data_parallel, gather, parallel_apply, replicate, scatter

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]

for _function in (data_parallel, gather, parallel_apply, replicate, scatter):
    _function.__module__ = __name__
