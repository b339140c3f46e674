"""Parallel training of one model by all ranks."""

from allranks.parallel.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
