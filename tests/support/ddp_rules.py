"""Shared parts of the DistributedDataParallel tests: torch's implementation as the oracle, and comparisons."""

import contextlib

import torch
import torch.distributed
from torch import nn

import allranks as dist

_kept_groups = []


@contextlib.contextmanager
def torchs_world(file):
    """Initialize torch.distributed on gloo with the ranks of the allranks world."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    # Keep a reference to the group. Its last owner joins its threads. If the last owner is a reducer, it joins with
    # the GIL held, and hangs if such a thread frees a Python object of a hook at that moment (torch issue 56297).
    _kept_groups.append(torch.distributed.group.WORLD)
    try:
        yield nn.parallel.DistributedDataParallel
    finally:
        torch.distributed.destroy_process_group()


def state(model):
    """Return every gradient (None if a parameter has none) and every buffer."""
    inner = model.module
    kept = [None if p.grad is None else p.grad.clone() for p in inner.parameters()]
    return kept, [b.clone() for b in inner.buffers()]


def assert_equal(mine, reference):
    """Assert that None occurs at the same positions and that values differ by rounding at most."""
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
