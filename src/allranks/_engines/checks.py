"""Checks of the tensors of a call, and the texts of the errors. All engines use them.

The fast path of the native engine (core/python/now.cc) rejects nothing. It accepts ordinary tensors and leaves all
others to the engine, which makes these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import UsageError
from allranks._call.types import PremulSum, ReduceOp

__all__ = [
    "CODES",
    "bare",
    "check_apart",
    "check_distinct",
    "check_has_elements",
    "check_own_piece",
    "check_pieces",
    "check_same_dtype",
    "check_storage",
    "check_tensor",
    "factor_of",
    "not_reduced",
    "not_taken",
]

_functorch: Any = torch._C._functorch

CODES = {getattr(torch, name): code for name, code in _core.DTYPES.items() if hasattr(torch, name)}
"""The core's codes of dtypes."""


def check_tensor(verb: str, tensor: object) -> Tensor:
    """Return the argument if it is a tensor.

    Raises:
        TypeError: It is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{verb}: expected a torch.Tensor, not {type(tensor).__name__}")
    return tensor


def check_has_elements(verb: str, tensor: Tensor, group: str, rank: int) -> None:
    """Check that a tensor has elements.

    Raises:
        UsageError: The tensor is on meta.
    """
    if tensor.is_meta:
        raise UsageError(
            f"{verb} on group '{group}' (rank {rank}): the tensor is on meta, so it has a shape but no elements.\n"
            "  Create it on a device, for example with torch.empty_like(tensor, device='cpu')."
        )


def bare(verb: str, tensor: Tensor) -> Tensor:
    """Return the plain tensor behind a tensor that `torch.func.grad` and similar functions track, else the same tensor.

    A call changes its elements. As with torch.distributed, torch's gradient does not pass through the call.

    Raises:
        UsageError: The tensor belongs to `torch.func.vmap`, and represents the rows of another tensor.
    """
    # Transforms can be nested, so there may be several wrappers.
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            raise UsageError(
                f"{verb}: cannot be called within torch.func.vmap, on one row of a tensor.\n  Call it before or after"
                " vmap, on all rows."
            )
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def check_storage(verb: str, tensor: Tensor) -> None:
    """Check that a tensor has memory for its elements.

    Raises:
        UsageError: The tensor's storage is smaller than its shape requires, because it was resized: FSDP frees
            parameters in this way. Or torch has not allocated it: zeros of derivatives.
    """
    tensor = bare(verb, tensor)
    if not tensor.numel():
        return
    # torch.autograd returns such tensors for derivatives. data_ptr() of one is 0.
    if tensor._is_zerotensor():
        raise UsageError(
            f"{verb}: the tensor has no memory: it represents zeros that torch has not allocated.\n"
            "  Pass tensor.clone()."
        )
    # The address behind the last element, which strides and offset may place beyond a shortened storage.
    end = 1 + tensor.storage_offset() + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = tensor.untyped_storage().nbytes()
    if end * tensor.element_size() > nbytes:
        raise UsageError(
            f"{verb}: the tensor of shape {tuple(tensor.shape)} needs {end * tensor.element_size()} bytes of its"
            f" storage, which has {nbytes}: it was freed, or resized (FSDP frees parameters in this way).\n  Make the"
            " call while the parameters are gathered, or pass another tensor."
        )


def not_taken(verb: str, tensor: Tensor) -> UsageError:
    """Return the error for a dtype or layout that an engine does not transfer."""
    action = "Convert it to another dtype." if tensor.layout is torch.strided else "Pass tensor.to_dense()."
    return UsageError(f"{verb}: a tensor of {tensor.dtype} with layout {tensor.layout} is not supported.\n  {action}")


def not_reduced(call: str, tensor: Tensor, op: ReduceOp, reduces: Callable[[ReduceOp], bool]) -> UsageError:
    """Return the error for an op that an engine does not implement for the dtype of a tensor.

    Args:
        call: The beginning of the message.
        tensor: The operand.
        op: The op.
        reduces: Whether the engine implements another op for this dtype.
    """
    ops = ", ".join(each.name for each in ReduceOp if each is not ReduceOp.PREMUL_SUM and reduces(each))
    others = f"Use one of {ops}, or convert" if ops else "Convert"
    action = f"{others} the tensor to another dtype."
    return UsageError(f"{call} does not support {op.name} of {tensor.dtype} tensors.\n  {action}")


def check_same_dtype(verb: str, first: Tensor, other: Tensor) -> None:
    """Check the dtypes of two tensors of a call.

    Raises:
        UsageError: They differ.
    """
    if other.dtype != first.dtype:
        raise UsageError(f"{verb}: the tensors must have the same dtype, not {first.dtype} and {other.dtype}")


def check_own_piece(verb: str, output: Tensor, given: Tensor, rank: int) -> None:
    """Check the tensors that a rank sends to itself.

    Raises:
        UsageError: The input and the output have different numbers of elements.
    """
    if output.numel() != given.numel():
        raise UsageError(
            f"{verb}: the output for this rank ({rank}) has {output.numel()} elements, "
            f"but its input has {given.numel()}.\n  Pass an output and an input of the same size."
        )


def factor_of(verb: str, op: ReduceOp | PremulSum) -> float | Tensor | None:
    """Return the factor by which operands are multiplied before they are reduced, or None.

    Raises:
        UsageError: PREMUL_SUM without a factor.
    """
    if isinstance(op, PremulSum):
        return op.factor
    if op is ReduceOp.PREMUL_SUM:
        raise UsageError(f"{verb}: PREMUL_SUM requires a factor.\n  Pass op=premul_sum(factor).")
    return None


def check_pieces(verb: str, pieces: object, like: Tensor, size: int, check: Callable[[Tensor, str], object]) -> None:
    """Check that there is one tensor per rank, each like ``like``: in a list, or consecutively in one tensor.

    Args:
        verb: The name of the call for error messages.
        pieces: The argument of the caller.
        like: The tensor of this rank.
        size: The number of ranks.
        check: The engine's own check of a tensor.

    Raises:
        TypeError: It is neither a tensor nor a list.
        UsageError: The number, dtype or size differs.
    """
    if isinstance(pieces, Tensor):
        check(pieces, verb)
        if pieces.dtype != like.dtype or pieces.numel() != size * like.numel():
            raise UsageError(
                f"{verb}: expected {size} x {like.numel()} elements of {like.dtype} in one tensor, "
                f"not {pieces.numel()} of {pieces.dtype}"
            )
        return
    if not isinstance(pieces, (list, tuple)):
        raise TypeError(f"{verb}: expected a tensor or a list of tensors, not {type(pieces).__name__}")
    if len(pieces) != size:
        raise UsageError(f"{verb}: expected a list of {size} tensors, one per rank, not {len(pieces)}")
    for rank, piece in enumerate(pieces):
        check(piece, verb)
        if piece.dtype != like.dtype or piece.numel() != like.numel():
            raise UsageError(
                f"{verb}: expected {like.numel()} elements of {like.dtype} in the tensor for rank {rank}, "
                f"not {piece.numel()} of {piece.dtype}"
            )


def check_apart(verb: str, results: Sequence[Tensor]) -> None:
    """Check that results do not share memory.

    For a tensor that is not contiguous, only its first element is compared: these tensors are written one after the
    other when the call has ended.

    Raises:
        UsageError: They share memory.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.nbytes if tensor.is_contiguous() else tensor.element_size(), index)
        for index, tensor in enumerate(results)
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.numel()
    )
    # After sorting, an overlap shows between neighbors.
    for (begin, nbytes, first), (after, _, second) in pairwise(spans):
        if begin and after < begin + nbytes:
            raise UsageError(
                f"{verb}: results {min(first, second)} and {max(first, second)} share memory, so one would "
                "overwrite the other.\n  Pass a separate tensor for each."
            )


def check_distinct(verb: str, tensor: Tensor) -> None:
    """Check that the elements of a result do not share memory.

    Raises:
        UsageError: Several elements share memory.
    """
    if _overlaps(tensor):
        raise UsageError(
            f"{verb}: several elements of the tensor share memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}: an expanded or overlapping view), so it cannot receive a result.\n"
            "  Call .contiguous() first."
        )


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements have the same address."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    reach = 0  # offset of the furthest element of the dimensions so far
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    # Each stride leads beyond the reach of the smaller ones, so no address repeats. No table of offsets is needed.
    else:
        return False
    if dims[0][0] == 0 or tensor.numel() > 1 + sum(stride * (size - 1) for stride, size in dims):
        return True  # more elements than addresses
    # The quick tests have not decided. Compare the offsets of all elements.
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        offsets = (offsets.unsqueeze(1) + stride * torch.arange(size, device="cpu")).flatten()
    distinct: Tensor = torch.unique(offsets)
    return distinct.numel() < offsets.numel()
