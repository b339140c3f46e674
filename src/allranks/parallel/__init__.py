"""Data-parallel training of one model, by all ranks or by all workers of a master."""

from allranks._base.public import publish
from allranks.parallel.ddp import DistributedDataParallel
from allranks.parallel.hooks import GradBucket
from allranks.remote.data_parallel import DataParallel

__all__ = ["DataParallel", "DistributedDataParallel", "GradBucket"]


publish(globals())
