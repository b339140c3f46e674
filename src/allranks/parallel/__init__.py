"""Parallel training of one model by all ranks."""

from allranks.parallel.ddp import DistributedDataParallel
from allranks.parallel.hooks import GradBucket

__all__ = ["DistributedDataParallel", "GradBucket"]
