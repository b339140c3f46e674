"""Variations on the collectives, where users of torch.distributed.algorithms look for them."""

from allranks.algorithms import ddp_comm_hooks

__all__ = ["ddp_comm_hooks"]
