"""The tensors of a call as engines take them: contiguous, where the engine can reach them, and kept alive until the
call has ended.

An engine that reaches only the host's memory gets copies there of tensors on a GPU or another device. Each of these
copies has ended when it returns: what is copied from a device is what its current stream had computed, and what is
copied back is there for whoever comes after `finish`, on whatever stream or thread.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from allranks._errors import AllranksError, UsageError
from allranks._types import scaled
from allranks._work import Work

__all__ = ["Operands", "OperandsWork", "check_pieces"]


class Operands:
    """The tensors of one call, in the shape that engines take: contiguous, in memory as they read.

    Args:
        verb: of the call, for errors.
        factor: what to multiply with what is read.
        on_host: whether all must be in the host's memory.
    """

    __slots__ = ("_back", "_device", "_factor", "_on_host", "keep", "results", "verb")

    def __init__(self, verb: str, factor: float | Tensor | None = None, on_host: bool = False) -> None:
        self.verb = verb
        self._factor = factor
        self._on_host = on_host
        self._device: torch.device | None = None
        self._back: list[tuple[Tensor, Tensor]] = []
        self.keep: list[Tensor] = []
        self.results: list[Tensor] = []

    def read(self, tensor: Tensor) -> Tensor:
        """What the engine reads in place of ``tensor``."""
        self._check_device(tensor)
        work = tensor if self._factor is None and self._fits(tensor) else self._copy(tensor)
        self.keep.append(work)
        return work

    def write(self, tensor: Tensor) -> Tensor:
        """What the engine writes, all of it, in place of ``tensor``; ``finish`` brings it there."""
        self._check_result(tensor)
        if self._fits(tensor):
            self.keep.append(tensor)
            return tensor
        if self._on_host and not tensor.is_cpu:
            _let_finish(tensor.device)
        return self._brought_back(tensor, self._room(tensor))

    def update(self, tensor: Tensor) -> Tensor:
        """What the engine reads and then writes in place of ``tensor``; ``finish`` brings it there."""
        self._check_result(tensor)
        if self._factor is None and self._fits(tensor):
            self.keep.append(tensor)
            return tensor
        return self._brought_back(tensor, self._copy(tensor))

    def fill(self, tensor: Tensor, part: Tensor) -> None:
        """Lets ``finish`` bring ``part``, which the engine writes, to ``tensor``."""
        self._check_result(tensor)
        _check_distinct(self.verb, tensor)
        self._back.append((tensor, part.view(tensor.shape)))

    def finish(self) -> None:
        back, self._back = self._back, []
        self.keep.clear()
        if back:
            with torch.no_grad():
                for tensor, work in back:
                    tensor.copy_(work)

    def _check_device(self, tensor: Tensor) -> None:
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            raise UsageError(f"{self.verb}: tensors on {self._device} and on {tensor.device} in one call")

    def _check_result(self, tensor: Tensor) -> None:
        self._check_device(tensor)
        self.results.append(tensor)

    def _fits(self, tensor: Tensor) -> bool:
        return _plain(tensor) and (tensor.is_cpu or not self._on_host)

    def _room(self, tensor: Tensor) -> Tensor:
        """Memory for all elements. Pinned memory is copied at once, where other memory goes through a buffer of the
        driver; torch keeps what was pinned, and gives it out again.
        """
        device = "cpu" if self._on_host else tensor.device
        pinned = self._on_host and tensor.is_cuda
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)

    def _copy(self, tensor: Tensor) -> Tensor:
        elements = tensor.detach().resolve_conj().resolve_neg()
        return self._room(tensor).copy_(elements if self._factor is None else scaled(elements, self._factor))

    def _brought_back(self, tensor: Tensor, work: Tensor) -> Tensor:
        _check_distinct(self.verb, tensor)
        self._back.append((tensor, work))
        self.keep.append(work)
        return work


class OperandsWork(Work):
    """An asynchronous call of an engine on such tensors. ``wait`` keeps the error of a call that has failed."""

    def __init__(self, operands: Operands) -> None:
        self.verb = operands.verb
        self._operands = operands
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the engine no longer uses the tensors."""

    def _finish(self) -> None:
        with self._lock:  # of several threads that wait, none shall go on before the results are where they belong
            self._operands.finish()

    def is_completed(self) -> bool:
        if not self.done():
            return False
        if self._error is None:
            with contextlib.suppress(AllranksError):  # wait and exception() report it
                self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def _results(self) -> list[Tensor]:
        return self._operands.results


def check_pieces(verb: str, pieces: object, like: Tensor, size: int, check: Callable[[Tensor, str], object]) -> None:
    """Raises unless there is one piece per rank, each like ``like``: in a list, or in turn in one tensor.

    Args:
        verb: for errors.
        pieces: what the caller gave.
        like: this rank's tensor.
        size: the number of ranks.
        check: the engine's own check of a tensor.

    Raises:
        TypeError: not a tensor or a list.
        UsageError: another number, dtype or size.
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


def _plain(tensor: Tensor) -> bool:
    # A lazily conjugated or negated tensor has a flag, not other bytes.
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _check_distinct(verb: str, tensor: Tensor) -> None:
    if _overlaps(tensor):
        raise UsageError(
            f"{verb}: several elements of the tensor share memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}: an expanded or overlapping view), so that no result can be written to it. "
            "Call .contiguous() first"
        )


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements lie at one place."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    reach = 0  # the furthest element of the dimensions so far
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        offsets = (offsets.unsqueeze(1) + stride * torch.arange(size, device="cpu")).flatten()
    distinct: Tensor = torch.unique(offsets)
    return distinct.numel() < offsets.numel()


def _let_finish(device: torch.device) -> None:
    """Waits for the current stream: what it still does with a tensor comes before what is copied to it later."""
    stream_of = getattr(getattr(torch, device.type, None), "current_stream", None)
    if stream_of is not None:  # mps, for one, has a single queue, in which the copies are too
        stream_of(device).synchronize()
