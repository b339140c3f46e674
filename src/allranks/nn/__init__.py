"""torch.nn's place for things that allranks has its own of: `allranks.nn.parallel`, `allranks.nn.functional`."""

from allranks.nn import functional, parallel

__all__ = ["functional", "parallel"]
