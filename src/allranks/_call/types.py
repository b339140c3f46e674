"""The small values that callers pass and get: reduce ops and statistics."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from allranks._base.errors import UsageError
from allranks._base.public import publish

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["PremulSum", "ReduceOp", "Stats", "as_reduce_op", "is_integer", "premul_sum", "reduce_op", "scaled"]


class ReduceOp(enum.IntEnum):
    """How ``all_reduce`` combines the ranks' elements; torch's names.

    ``SUM, PRODUCT, MIN, MAX`` take integers, floating point and bool; ``AVG`` (the sum, divided by
    the number of ranks; of integers, rounded towards zero, as nccl's) takes integers and floating
    point; ``SUM`` and ``AVG`` take complex numbers too;
    ``BAND, BOR, BXOR`` take integers and bool. On bool, SUM and MAX are "or", PRODUCT and MIN are
    "and". MIN and MAX propagate NaN, integers wrap; float16 and bfloat16 are accumulated in
    float32 and rounded once. Elements are combined in the order of the ranks, 0 to P - 1.
    """

    # The numbers are the core's (core/base/types.h); tests/api holds them to it.
    SUM = 0
    AVG = 1
    PRODUCT = 2
    PROD = 2  # the same, shorter
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8  # see premul_sum

    def __str__(self) -> str:
        return f"ReduceOp.{self.name}"

    __format__ = enum.Enum.__format__


class PremulSum(NamedTuple):
    """What ``premul_sum`` returns."""

    factor: float | Tensor


def premul_sum(factor: float | Tensor) -> PremulSum:
    """The op of ``all_reduce``, ``reduce`` and ``reduce_scatter`` that sums every rank's tensor times its ``factor``.

    Args:
        factor: a number, or a tensor of one element; each rank's own.

    Tensors of integers take a factor that is an integer; bool takes none.

    Raises:
        UsageError: the factor is something else.

    Cost:
        that of SUM and one copy of the tensor.
    """
    if isinstance(factor, bool) or (not isinstance(factor, (int, float)) and getattr(factor, "numel", int)() != 1):
        raise UsageError(f"premul_sum: the factor must be a number or a tensor of one element, not {factor!r}")
    return PremulSum(factor if isinstance(factor, (int, float)) else factor.detach().reshape(()))


def scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """A new tensor: ``tensor`` times a factor of ``premul_sum``, of the same dtype. Autograd goes through it.

    Raises:
        UsageError: the product would be cut down to that dtype.
    """
    import torch  # late: the launcher does without

    if not isinstance(factor, (int, float)):
        factor = factor.to(tensor.device)
    if not torch.can_cast(torch.result_type(tensor, factor), tensor.dtype):
        number = factor if isinstance(factor, (int, float)) else factor.item()
        raise UsageError(f"premul_sum: a factor of {number} on {tensor.dtype} tensors, which cannot hold the products")
    return (tensor * factor).to(tensor.dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether it is one of numbers without fractions; bool is not."""
    import torch  # late: the launcher does without

    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


reduce_op = ReduceOp  # the spelling of torch before 1.0


def as_reduce_op(op: object) -> ReduceOp | PremulSum:
    """The op meant by ``op``: ours, or torch.distributed's of the same name."""
    if isinstance(op, PremulSum):
        return op
    if isinstance(op, ReduceOp):
        return op
    op = getattr(op, "op", op)  # that of torch's ReduceOp object, as its AllreduceOptions have it
    name = getattr(op, "name", None) or str(op).rpartition(".")[2]
    if type(op).__name__ in ("RedOpType", "ReduceOp") and name in ReduceOp.__members__:
        return ReduceOp[name]
    raise TypeError(f"op must be one of ReduceOp.{{{', '.join(ReduceOp.__members__)}}}, not {op!r}")


class Stats(NamedTuple):
    """What this process has done in a group since it was made.

    Attributes:
        calls: finished calls.
        bytes: the bytes of their tensors.
        seconds: wall time inside them: moving, reducing, and waiting for other ranks. Calls that
            run beside computation (``async_op=True``) count too.
        shared: of the calls those that copied nothing, working in all ranks' shared tensors (``empty_shared``).
    """

    calls: int
    bytes: int
    seconds: float
    shared: int


publish(globals())
