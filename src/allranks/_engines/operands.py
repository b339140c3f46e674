"""The tensors of a call as engines take them: contiguous, in accessible memory, and alive until the call has ended.

An engine that can access host memory only receives host copies of tensors on a GPU or another device. Each of these
copies is complete when the copying call returns. A copy from a device contains the result of all earlier work on its
current stream. A copy back to the device is visible to all streams and threads after `finish`.

Engines write results while they still read operands. An operand that shares memory with a result is therefore copied.
The exception is an operand that is exactly one piece of the result, as in calls in place. Results that share memory are
rejected.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allranks._base.errors import UsageError
from allranks._base.forks import forks, refusal
from allranks._call.futures import End
from allranks._call.types import scaled
from allranks._call.work import Work
from allranks._engines.checks import bare, check_apart, check_distinct

__all__ = ["Operands", "OperandsWork", "different"]


class Operands:
    """The tensors of one call, in the form that engines take: contiguous, without lazy conjugation or negation.

    Args:
        verb: The name of the call for error messages.
        factor: The factor by which operands are multiplied.
        on_host: Whether all tensors must be in host memory.
    """

    __slots__ = ("_back", "_device", "_factor", "_on_host", "keep", "then", "verb")

    def __init__(self, verb: str, factor: float | Tensor | None = None, on_host: bool = False) -> None:
        self.verb = verb
        self._factor = factor
        self._on_host = on_host
        self._device: torch.device | None = None
        self._back: list[tuple[Tensor, Tensor]] = []
        self.keep: list[Tensor] = []
        self.then: Callable[[], object] | None = None
        """The action that remains on the data that the engine has written."""

    def read(self, tensor: Tensor, results: Sequence[Tensor] = (), slot: int | None = None) -> Tensor:
        """Return the tensor that the engine reads instead of ``tensor``.

        Args:
            tensor: The tensor of the caller.
            results: The tensors that the engine writes at the same time. No copy is needed if the two are the same, or
                if one is a whole piece of the other.
            slot: The number of this piece. None: any piece.
        """
        # The core and the engines know nothing of functorch's wrappers.
        tensor = bare(self.verb, tensor)
        self._check_device(tensor)
        # The factor needs a copy in any case: the caller's operand must not change.
        as_it_is = self._factor is None and self._fits(tensor)
        work = tensor if as_it_is and not any(_clash(tensor, r, slot) for r in results) else self._copy(tensor)
        self.keep.append(work)
        return work

    def exchange(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: int) -> tuple[list[Tensor], ...]:
        """Return what the engine reads and writes in an all_to_all, by rank. Piece r may be the same in both."""
        outputs = [bare(self.verb, tensor) for tensor in outputs]
        check_apart(self.verb, outputs)
        # One copy for all ranks, not one for each.
        once = {id(tensor): tensor for tensor in inputs}  # all_gather passes the same tensor for every rank
        read = {key: self.read(tensor) for key, tensor in once.items()}
        reads = [read[id(tensor)] for tensor in inputs]
        writes = [self.write(tensor) for tensor in outputs]
        # Only the operands that really collide are copied. Most all_to_all calls copy nothing.
        for key in {id(inputs[r]) for r in _clashes(reads, writes, own)}:
            read[key] = self._copy(read[key])
            self.keep.append(read[key])
        return [read[id(tensor)] for tensor in inputs], writes

    def read_each(self, tensors: Sequence[Tensor], results: Sequence[Tensor] = ()) -> list[Tensor]:
        """Apply ``read`` to several tensors."""
        return [self.read(tensor, results) for tensor in tensors]

    def write_each(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply ``write`` to several tensors, which must not share memory."""
        tensors = [bare(self.verb, tensor) for tensor in tensors]
        check_apart(self.verb, tensors)
        return [self.write(tensor) for tensor in tensors]

    def write(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the engine writes completely instead of ``tensor``. ``finish`` copies it back."""
        tensor = bare(self.verb, tensor)
        self._check_device(tensor)
        if self._fits(tensor):
            self.keep.append(tensor)
            return tensor
        # The elements are not read, so nothing else orders the later copy after earlier work of the stream.
        if self._on_host and not tensor.is_cpu:
            _let_finish(tensor.device)
        # A copy back into elements that share memory would have no defined result.
        check_distinct(self.verb, tensor)
        return self._brought_back(tensor, self._room(tensor))

    def update(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the engine reads and then writes instead of ``tensor``. ``finish`` copies it back."""
        tensor = bare(self.verb, tensor)
        self._check_device(tensor)
        if self._factor is None and self._fits(tensor):
            self.keep.append(tensor)
            return tensor
        check_distinct(self.verb, tensor)  # before the copy, which is wasted if this raises
        return self._brought_back(tensor, self._copy(tensor))

    def fill(self, tensor: Tensor, part: Tensor) -> None:
        """Let ``finish`` copy ``part``, which the engine writes, to ``tensor``."""
        tensor = bare(self.verb, tensor)
        self._check_device(tensor)
        check_distinct(self.verb, tensor)
        self._back.append((tensor, part.view(tensor.shape)))

    def finish(self) -> None:
        """Copy the results to their destinations. A call after an interrupted one completes the rest."""
        if self.then is not None:
            self.then()
            self.then = None
        while self._back:
            tensor, work = self._back[-1]
            # Without no_grad, the copy into a leaf that requires a gradient would raise.
            # Tensors of inference mode can be changed only in that mode, and the waiting thread may not be in it.
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                _copyable(tensor).copy_(_copyable(work))
            # Removed after the copy: if Ctrl-C interrupts the copy, the next `finish` repeats it.
            self._back.pop()
        # Last: until here, the engine's memory must stay alive.
        self.keep.clear()

    def _check_device(self, tensor: Tensor) -> None:
        if self._device is None:
            self._device = tensor.device
            if self._on_host and not tensor.is_cpu:
                _check_not_captured(self.verb, tensor.device)
        elif tensor.device != self._device:
            raise UsageError(f"{self.verb}: tensors must be on one device, not on {self._device} and {tensor.device}")

    def _fits(self, tensor: Tensor) -> bool:
        return _plain(tensor) and (tensor.is_cpu or not self._on_host)

    def _room(self, tensor: Tensor) -> Tensor:
        """Return memory for all elements.

        Pinned memory is copied directly, while other memory goes through a buffer of the driver. torch caches pinned
        memory and reuses it.
        """
        device = "cpu" if self._on_host else tensor.device
        pinned = self._on_host and tensor.is_cuda
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)

    def _copy(self, tensor: Tensor) -> Tensor:
        # The engines transfer bytes. They would ignore the lazy conjugate and negative bits.
        elements = tensor.detach().resolve_conj().resolve_neg()
        room = self._room(tensor)
        _copyable(room).copy_(_copyable(elements if self._factor is None else scaled(elements, self._factor)))
        return room

    def _brought_back(self, tensor: Tensor, work: Tensor) -> Tensor:
        self._back.append((tensor, work))
        self.keep.append(work)
        return work


def _copyable(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor if torch cannot copy its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor


class OperandsWork(Work):
    """An asynchronous call of an engine on such tensors. ``wait`` keeps the error of a failed call."""

    def __init__(self, operands: Operands) -> None:
        self.verb = operands.verb
        self._operands = operands
        self._error: BaseException | None = None
        self._finished = False
        self._lock = threading.Lock()
        self._forks = forks()

    @abc.abstractmethod
    def done(self) -> bool:
        """Return whether the engine no longer uses the tensors."""

    def _finish(self) -> None:
        with self._lock:  # if several threads wait, none may continue before the results are copied back
            if self._error is not None:
                raise self._error
            try:
                self._operands.finish()
            except Exception as error:
                self._error = error  # a second wait raises it again
                raise
        # Only now: a thread that sees this flag returns without the lock.
        self._finished = True

    def is_completed(self) -> bool:
        if self._finished or self._error is not None:
            return True
        # In a forked child, the engine's call belongs to the parent and cannot be polled.
        if self._forks != forks():
            raise refusal(f"is_completed of {self.verb}: its group")
        if not self.done():
            return False
        if self._error is None:
            with contextlib.suppress(Exception):  # wait and exception() report it
                self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def end(self, ticket: int) -> End:
        # An engine that cannot notify is polled by the watcher of the futures.
        return End.PAST if self.done() else End.POLLED


def different(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without duplicates."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _clash(tensor: Tensor, result: Tensor, slot: int | None) -> bool:
    """Return whether contiguous tensors overlap, unless one is a whole piece (piece ``slot`` if given) of the other."""
    # The smaller one can be a piece of the larger one, not vice versa.
    (piece, small), (nbytes, large) = sorted((t.nbytes, t.data_ptr()) for t in (tensor, result))
    if piece == 0 or small >= large + nbytes or large >= small + piece:
        return False
    before, beside = divmod(small - large, piece)
    # The same positions are written and read in the same order, so a whole piece in its own slot is safe.
    return beside > 0 or before < 0 or small + piece > large + nbytes or slot not in (None, before)


def _clashes(reads: Sequence[Tensor], writes: Sequence[Tensor], own: int) -> list[int]:
    """Return the pieces of an all_to_all whose operand is overwritten by a result that is not exactly in its place.

    Args:
        reads: Contiguous tensors, by rank.
        writes: Contiguous tensors that do not overlap, by rank.
        own: This rank. Its own piece is not written if it is already in place.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, rank)
        for rank, tensor in enumerate(writes)
        # A result in place is neither copied nor written, so other operands may overlap it.
        if tensor.nbytes and not (rank == own and tensor.data_ptr() == reads[own].data_ptr())
    )
    ends = [end for _, end, _ in spans]
    found = []
    for rank, tensor in enumerate(reads):
        place = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, rank
        first = bisect_right(ends, place[0])
        # The results do not overlap each other, so the first two decide. There is no clash if the operand overlaps no
        # result, or only the result that is exactly in its place.
        over = [span for span in spans[first : first + 2] if tensor.nbytes and span[0] < place[1]]
        if over and over != [place]:
            found.append(rank)
    return found


def _plain(tensor: Tensor) -> bool:
    # A lazily conjugated or negated tensor has a flag; its bytes are not changed.
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _check_not_captured(verb: str, device: torch.device) -> None:
    """Raise an error if the current stream records a graph.

    A graph cannot repeat the exchange between the ranks, and the wait for a copy would make the recording fail.
    """
    captures = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    if captures is not None and captures():
        raise UsageError(
            f"{verb}: the current stream of {device} is being captured in a graph, but this engine copies tensors of"
            f" {device.type} through the host, which a graph cannot contain.\n  Make the call outside of the capture,"
            " or use the engine nccl for tensors on GPUs."
        )


def _let_finish(device: torch.device) -> None:
    """Wait for the current stream: its earlier work on a tensor must complete before data is copied to the tensor."""
    stream_of = getattr(getattr(torch, device.type, None), "current_stream", None)
    if stream_of is not None:  # mps, for example, has a single queue that also contains the copies
        stream_of(device).synchronize()
