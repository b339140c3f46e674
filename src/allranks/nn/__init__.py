"""Counterparts of modules of torch.nn: `allranks.nn.parallel`, `allranks.nn.functional`."""

from allranks.nn import functional, parallel

__all__ = ["functional", "parallel"]
