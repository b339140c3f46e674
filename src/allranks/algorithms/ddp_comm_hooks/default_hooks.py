"""Hooks that reduce as without a hook, but may send 16 bits for each element; torch's names.

Halving what is sent pays where sending is slow. Through shared memory it seldom does: the two conversions
cost about as much as the bytes that they save.

Each takes a process group (None: the world) as its state. 16-bit elements are added up in 32 bits and rounded
once (`ReduceOp.AVG`), so that, unlike torch's, none divides before the sum for fear of an overflow. Complex
gradients are sent as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allranks._api import collectives
from allranks._call.types import ReduceOp
from allranks._group.process_group import ProcessGroup
from allranks.parallel.hooks import GradBucket, Hook

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Future = torch.futures.Future


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """The mean over the ranks: the same bits as without a hook."""
    work = collectives.all_reduce(bucket.buffer(), ReduceOp.AVG, process_group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """The mean over the ranks, sent as float16. Gradients beyond 65504 become infinite."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """The mean over the ranks, sent as bfloat16: float32's range, 3 digits."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """``hook`` on the bucket as float16; its result goes back to the bucket's own dtype."""
    return _compressed(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """``hook`` on the bucket as bfloat16; its result goes back to the bucket's own dtype."""
    return _compressed(hook, torch.bfloat16)


def _compressed(hook: Hook, dtype: torch.dtype) -> Hook:
    def compressed(state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():  # there is no dtype of half the size that keeps the imaginary part
            return hook(state, bucket)
        # The inner hook reads the bucket's buffer, so the narrow copy replaces it until the result has arrived.
        bucket.set_buffer(buffer.to(dtype))

        def decompress(future: Future[Tensor]) -> Tensor:
            bucket.set_buffer(buffer)
            return buffer.copy_(future.value())

        return hook(state, bucket).then(decompress)

    compressed.__qualname__ = f"{getattr(hook, '__qualname__', hook)} as {dtype}"
    return compressed
