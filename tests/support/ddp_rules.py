"""What the tests of DistributedDataParallel share: torch's own as the oracle, and how results are compared."""

import contextlib

import torch
import torch.distributed
from torch import nn

import allranks as dist

_kept_groups = []


@contextlib.contextmanager
def torchs_world(file):
    """torch.distributed over gloo, with our ranks."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    # Of a group's owners the last ends its threads. A reducer that is the last does so with the GIL held, which hangs
    # when such a thread frees a Python object of a hook at that moment (torch's issue 56297).
    _kept_groups.append(torch.distributed.group.WORLD)
    try:
        yield nn.parallel.DistributedDataParallel
    finally:
        torch.distributed.destroy_process_group()


def state(model):
    """Every gradient (None where there is none) and every buffer."""
    inner = model.module
    kept = [None if p.grad is None else p.grad.clone() for p in inner.parameters()]
    return kept, [b.clone() for b in inner.buffers()]


def assert_equal(mine, reference):
    """The same Nones, and values that differ by rounding at most."""
    for a, b in zip(mine, reference, strict=True):
        if isinstance(b, (list, tuple)):
            assert_equal(a, b)
        elif b is None:
            assert a is None
        else:
            assert a is not None
            torch.testing.assert_close(a, b)


def assert_same_bits(mine, other):
    for a, b in zip(mine, other, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
