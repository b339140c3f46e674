"""`allranks.nn.parallel.DistributedDataParallel`: where users of torch.nn.parallel look for it."""

from allranks.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
