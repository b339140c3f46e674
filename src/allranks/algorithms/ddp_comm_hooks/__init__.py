"""Communication hooks for `allranks.nn.parallel.DistributedDataParallel.register_comm_hook`."""

from allranks.algorithms.ddp_comm_hooks import default_hooks

__all__ = ["default_hooks"]
