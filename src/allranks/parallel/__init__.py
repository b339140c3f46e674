"""Parallel training of one model: by all ranks, or by all workers of a master."""

from allranks._base.public import publish
from allranks.parallel.data_parallel import DataParallel
from allranks.parallel.ddp import DistributedDataParallel
from allranks.parallel.hooks import GradBucket

__all__ = ["DataParallel", "DistributedDataParallel", "GradBucket"]


publish(globals())
