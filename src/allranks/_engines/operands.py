"""The tensors of a call as engines take them: contiguous, and kept alive until the call has ended."""

from __future__ import annotations

import abc
import contextlib

import torch
from torch import Tensor

from allranks._errors import AllranksError, UsageError
from allranks._types import scaled
from allranks._work import Work

__all__ = ["Operands", "OperandsWork"]


class Operands:
    """The tensors of one call, in the shape that engines take: contiguous, in memory as they read."""

    __slots__ = ("_back", "_factor", "_staged", "keep", "results", "verb")

    def __init__(self, verb: str, factor: float | Tensor | None = None, staged: bool = False) -> None:
        """``factor`` multiplies what is reduced; ``staged`` tensors lie in the memory of the host."""
        self.verb = verb
        self._staged = staged
        self._factor = factor
        self._back: list[tuple[Tensor, Tensor]] = []
        self.keep: list[Tensor] = []
        self.results: list[Tensor] = []

    def read(self, tensor: Tensor) -> Tensor:
        """What the engine reads in place of ``tensor``."""
        work = tensor if self._factor is None and self._taken(tensor) else self._elements(tensor, self._factor)
        self.keep.append(work)
        return work

    def write(self, tensor: Tensor, scaled: bool = True) -> Tensor:
        """What the engine writes in place of ``tensor`` (and reads, ``scaled``); ``finish`` brings it there."""
        self.results.append(tensor)
        factor = self._factor if scaled else None
        if factor is None and self._taken(tensor):
            self.keep.append(tensor)
            return tensor
        _check_distinct(self.verb, tensor)
        work = self._elements(tensor, factor)
        self._back.append((tensor, work))
        self.keep.append(work)
        return work

    def fill(self, tensor: Tensor, part: Tensor) -> None:
        """Lets ``finish`` bring ``part``, which the engine writes, to ``tensor``."""
        self.results.append(tensor)
        _check_distinct(self.verb, tensor)
        self._back.append((tensor, part.view(tensor.shape)))

    def finish(self) -> None:
        back, self._back = self._back, []
        self.keep.clear()
        if back:
            with torch.no_grad():
                for tensor, work in back:
                    tensor.copy_(work)

    def _taken(self, tensor: Tensor) -> bool:
        return _plain(tensor) and (tensor.is_cpu or not self._staged)

    def _elements(self, tensor: Tensor, factor: float | Tensor | None) -> Tensor:
        elements = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        elements = elements if factor is None else scaled(elements, factor)
        return elements.cpu() if self._staged else elements


class OperandsWork(Work):
    """An asynchronous call of an engine on such tensors. ``wait`` keeps the error of a call that has failed."""

    def __init__(self, operands: Operands) -> None:
        self.verb = operands.verb
        self._operands = operands
        self._error: BaseException | None = None

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the engine no longer uses the tensors."""

    def is_completed(self) -> bool:
        if not self.done():
            return False
        if self._error is None:
            with contextlib.suppress(AllranksError):  # wait and exception() report it
                self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._operands.results


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
