"""torch.nn's place for things that allranks has its own of: `allranks.nn.parallel`."""

from allranks.nn import parallel

__all__ = ["parallel"]
