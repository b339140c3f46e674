"""Small types of arguments and results: reduce ops and statistics."""

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
    """The operation with which ``all_reduce`` combines the elements of the ranks, with torch's names.

    ``SUM, PRODUCT, MIN, MAX`` accept integers, floating point and bool. ``AVG`` is the sum divided by the number of
    ranks, rounded toward zero for integers as in nccl. It accepts integers and floating point. ``SUM`` and ``AVG`` also
    accept complex numbers. ``BAND, BOR, BXOR`` accept integers and bool. On bool, SUM and MAX are "or", PRODUCT and MIN
    are "and". MIN and MAX propagate NaN. Integers wrap on overflow. float16 and bfloat16 are accumulated in float32 and
    rounded once. Elements are combined in the order of the ranks, 0 to P - 1.
    """

    # The numbers equal those of the core (core/base/types.h); tests/api verifies this.
    SUM = 0
    AVG = 1
    PRODUCT = 2
    PROD = 2  # alias of PRODUCT
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
    """The reduce op that ``premul_sum`` returns."""

    factor: float | Tensor


def premul_sum(factor: float | Tensor) -> PremulSum:
    """Return an op that multiplies each rank's tensor by its ``factor`` and sums the products.

    The op is accepted by ``all_reduce``, ``reduce`` and ``reduce_scatter``.

    Args:
        factor: A number, or a tensor of one element. Each rank passes its own factor.

    Integer tensors require an integer factor. bool tensors are not accepted.

    Raises:
        UsageError: The factor is neither a number nor a tensor of one element.

    Cost:
        The cost of SUM, and one copy of the tensor.
    """
    if isinstance(factor, bool) or (not isinstance(factor, (int, float)) and getattr(factor, "numel", int)() != 1):
        raise UsageError(f"premul_sum: the factor must be a number or a tensor of one element, not {factor!r}")
    return PremulSum(factor if isinstance(factor, (int, float)) else factor.detach().reshape(()))


def scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``tensor`` times a factor of ``premul_sum`` as a new tensor of the same dtype. Supports autograd.

    Raises:
        UsageError: The dtype of the tensor cannot hold the product.
    """
    import torch  # late: the launcher does not need it

    if not isinstance(factor, (int, float)):
        factor = factor.to(tensor.device)
    wide = torch.result_type(tensor, factor)
    if not torch.can_cast(wide, tensor.dtype):
        number = factor if isinstance(factor, (int, float)) else factor.item()
        raise UsageError(
            f"premul_sum: a factor of {number} on {tensor.dtype} tensors, which cannot hold the product.\n"
            f"  Convert the tensors to {wide}{', or pass an integer factor' if is_integer(tensor.dtype) else ''}."
        )
    return (tensor * factor).to(tensor.dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether it is an integer dtype. bool is not."""
    import torch  # late: the launcher does not need it

    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


reduce_op = ReduceOp  # the spelling of torch before 1.0


def as_reduce_op(op: object) -> ReduceOp | PremulSum:
    """Return the allranks op for ``op``: an op of allranks, or torch.distributed's op of the same name."""
    if isinstance(op, PremulSum):
        return op
    if isinstance(op, ReduceOp):
        return op
    op = getattr(op, "op", op)  # torch's AllreduceOptions contain a ReduceOp object with an attribute `op`
    name = getattr(op, "name", None) or str(op).rpartition(".")[2]
    # Compared by name, because this module must not import torch.
    if type(op).__name__ in ("RedOpType", "ReduceOp") and name in ReduceOp.__members__:
        return ReduceOp[name]
    raise TypeError(f"op must be one of ReduceOp.{{{', '.join(ReduceOp.__members__)}}}, not {op!r}")


class Stats(NamedTuple):
    """Statistics of the calls of this process in a group since the creation of the group.

    Attributes:
        calls: Number of finished calls.
        bytes: Bytes of their tensors.
        seconds: Wall time inside the calls in seconds: moving, reducing, and waiting for other ranks. Asynchronous
            calls (``async_op=True``), which run concurrently with computation, are included.
        shared: Number of the calls that copied nothing because they used the ranks' shared tensors (``empty_shared``).
    """

    calls: int
    bytes: int
    seconds: float
    shared: int


publish(globals())
