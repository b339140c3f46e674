"""Collectives of an engine that can only exchange bytes between ranks. A new transport implements only this exchange.

A reduction sends the unreduced operands to each rank that needs the result. Each of these ranks combines them in the
order of the ranks. This is correct for every op, and gives the same bits on every rank. An engine with a better method
for a verb overrides the ``begin_...`` method of that verb.

Cost: an all_reduce of n bytes sends (P - 1) n bytes per rank, while a ring sends 2 (P - 1) / P n.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from allranks._base.errors import AllranksError, TimeoutError
from allranks._call.types import ReduceOp
from allranks._engines.flat import ON_BITS, ON_BOOLS, ON_NUMBERS, FlatEngine, FlatWork, Progress, as_bytes
from allranks._engines.flat_calls import GroupTimeout

if TYPE_CHECKING:
    from allranks._engines.spec import GroupSetup

__all__ = ["BytesEngine", "Pending"]

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)

Pieces = Sequence[Tensor | None]


class Pending(Progress):
    """A call whose end another thread reports with ``finish`` or ``fail``."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._source = -1
        self._error: BaseException | None = None

    def finish(self, source: int = -1) -> None:
        """Report that the call has succeeded.

        Args:
            source: The sender of a received message.
        """
        # Before the event, which publishes it to the waiting threads.
        self._source = source
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Report that the call has failed. Its caller gets the error."""
        # Before the event: a waiting thread reads the error as soon as the event is set.
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def source(self) -> int:
        return self._source


class BytesEngine(FlatEngine):
    """An engine that exchanges bytes in host memory. Tensors of other devices are copied to the host and back.

    A subclass implements ``exchange``, ``send_bytes``, ``receive_bytes``, ``close`` and ``abandon``. The tensors that
    it receives are flat, contiguous and of bytes. It may use them until the call's Progress has ended.
    """

    on_host = True

    def __init__(self, name: str, setup: GroupSetup) -> None:
        super().__init__(name, setup.rank, setup.members, setup.group_name, setup.timeout_s)
        self._lost = ""  # why the group cannot be used any more

    # --- To be implemented by a subclass ---

    @abc.abstractmethod
    def exchange(self, gives: Pieces, gets: Pieces) -> Progress:
        """Begin to send ``gives[r]`` to each rank r, and to receive ``gets[r]`` from it.

        All ranks call it in the same order. None: no data goes this way, and both sides pass None. For this rank itself
        both are None.
        """

    @abc.abstractmethod
    def send_bytes(self, given: Tensor, to: int, tag: int) -> Progress:
        """Begin to send a message."""

    @abc.abstractmethod
    def receive_bytes(self, into: Tensor, source: int, tag: int) -> Progress:
        """Begin to receive a message of this tag, from a rank, or from any rank if ``source`` is negative."""

    # --- Provided by this class ---

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        if dtype in _COMPLEX:
            return op in (ReduceOp.SUM, ReduceOp.AVG)
        if dtype is torch.bool:
            return op in ON_BOOLS
        if dtype in _INTEGERS:
            return op in (*ON_NUMBERS, *ON_BITS, ReduceOp.AVG)
        return dtype in _FLOATS and op in (*ON_NUMBERS, ReduceOp.AVG)

    def begin_all_reduce(self, flat: Tensor, op: ReduceOp) -> Progress:
        return self._reduced([flat] * self._size, flat, flat, op)

    def begin_reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Progress:
        gives: list[Tensor | None] = [None] * self._size
        gives[root] = flat
        return self._reduced(gives, flat, flat if root == self.rank else None, op)

    def begin_reduce_scatter(self, into: Tensor, given: Tensor, op: ReduceOp) -> Progress:
        pieces = self._cut(given)
        return self._reduced(pieces, pieces[self.rank], into, op)

    def begin_broadcast(self, flat: Tensor, root: int) -> Progress:
        if root == self.rank:
            return self._exchanged([flat] * self._size, [None] * self._size)
        return self._exchanged([None] * self._size, self._only(root, flat))

    def begin_all_gather(self, into: Tensor, given: Tensor) -> Progress:
        return self._exchanged([given] * self._size, self._cut(into), given)

    def begin_gather(self, into: Tensor | None, given: Tensor, root: int) -> Progress:
        # Only the root passes an output, so the argument also shows whether this rank is the root.
        if into is not None:
            return self._exchanged([None] * self._size, self._cut(into), given)
        return self._exchanged(self._only(root, given), [None] * self._size)

    def begin_scatter(self, into: Tensor, given: Tensor | None, root: int) -> Progress:
        if given is None:
            return self._exchanged([None] * self._size, self._only(root, into))
        pieces = self._cut(given)
        return self._exchanged(pieces, self._only(root, into), pieces[root])

    def begin_all_to_all(self, into: Tensor, given: Tensor, gets: list[int], gives: list[int]) -> Progress:
        pieces = torch.split(given, gives)
        return self._exchanged(pieces, torch.split(into, gets), pieces[self.rank])

    def begin_barrier(self) -> Progress:
        # Each rank waits for one byte of every other rank. A barrier therefore needs no verb of its own.
        return self._exchanged([torch.zeros(1, dtype=torch.uint8, device="cpu")] * self._size, self._cut(self._room(1)))

    def begin_send(self, given: Tensor, to: int, tag: int) -> Progress:
        self._check_usable()
        return _Limited(self, self.send_bytes(given, to, tag))

    def begin_recv(self, into: Tensor, source: int, tag: int) -> Progress:
        self._check_usable()
        return _Limited(self, self.receive_bytes(into, source, tag))

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        if isinstance(error, GroupTimeout):
            raise TimeoutError(
                f"{self.here(verb)}: another rank did not call within {self.timeout_s:g} s"
                f"{', and the group cannot be used any more' if self._lost else ''}.\n"
                "  Set a longer timeout with init_process_group(timeout=...)."
            ) from None
        super().explain(error, verb)

    def give_up(self, work: FlatWork) -> None:
        # A message concerns two ranks. After a collective without this rank, the ranks are at different calls.
        if work.verb not in ("send", "recv"):
            self._lost = self._lost or f"{work.verb} was abandoned before it completed"

    @property
    def _size(self) -> int:
        return len(self.members)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        # view cannot infer the length of a row from a tensor without elements.
        return list(flat.view(self._size, -1).unbind()) if flat.numel() else [flat] * self._size

    def _only(self, rank: int, piece: Tensor) -> list[Tensor | None]:
        return [piece if other == rank else None for other in range(self._size)]

    def _room(self, nbytes: int) -> Tensor:
        return torch.zeros(self._size * nbytes, dtype=torch.uint8, device="cpu")

    def _check_usable(self) -> None:
        if self._lost:
            raise AllranksError(
                f"group '{self.group_name}' cannot be used any more: {self._lost}.\n"
                "  Destroy it on all its ranks, and create a new group."
            )

    def _exchanged(
        self, gives: Pieces, gets: Pieces, own: Tensor | None = None, then: Callable[[], object] | None = None
    ) -> Progress:
        """Exchange tensors. If this rank receives one from itself, that is a copy of ``own``."""
        self._check_usable()
        mine = gets[self.rank]
        # The transport does not send to the rank itself. In place, the piece is already where it belongs.
        if mine is not None and own is not None and mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        others = [
            [None if rank == self.rank or piece is None else as_bytes(piece) for rank, piece in enumerate(pieces)]
            for pieces in (gives, gets)
        ]
        return _Limited(self, self.exchange(*others), then)

    def _reduced(self, gives: Pieces, own: Tensor, into: Tensor | None, op: ReduceOp) -> Progress:
        """Send operands. If ``into`` is not None, receive those of all ranks and write their combination to it."""
        if into is None:
            return self._exchanged(gives, [None] * self._size)
        # All operands are kept until the end, because they must be combined in the order of the ranks.
        rows, result = own.new_empty(self._size, own.numel()), into
        return self._exchanged(gives, rows.unbind(), own, lambda: result.copy_(_combined(rows, op)))


class _Limited(Progress):
    """A call with the group's timeout, and with an action on this rank when its bytes have arrived."""

    def __init__(self, engine: BytesEngine, call: Progress, then: Callable[[], object] | None = None) -> None:
        self._engine = engine
        self._call = call
        self._then = then
        self._lock = threading.Lock()
        self._waited_s = 0.0

    def done(self) -> bool:
        return self._call.done()

    def wait(self, seconds: float) -> bool:
        began = time.monotonic()
        if not self._call.wait(seconds):
            # Summed over the slices of the wait, which are short so that Ctrl-C is noticed.
            self._waited_s += time.monotonic() - began
            if self._waited_s >= self._engine.timeout_s:
                raise GroupTimeout
            return False
        with self._lock:  # if several threads wait, only one of them combines the operands
            then, self._then = self._then, None
            if then is not None:
                then()
        return True

    def source(self) -> int:
        return self._call.source()


def _combined(rows: Tensor, op: ReduceOp) -> Tensor:
    """Return the combination of the rows, in their order. 16-bit floats are computed in float32 and rounded once."""
    # A copy, because it accumulates: rows[0] may have the same dtype.
    total = rows[0].to(torch.float32 if rows.dtype in _HALVES else rows.dtype, copy=True)
    for row in rows[1:]:
        match op:
            case ReduceOp.SUM | ReduceOp.AVG:
                total.add_(row)
            case ReduceOp.PRODUCT:
                total.mul_(row)
            case ReduceOp.MIN:
                total = torch.minimum(total, row.to(total.dtype))
            case ReduceOp.MAX:
                total = torch.maximum(total, row.to(total.dtype))
            case ReduceOp.BAND:
                total.bitwise_and_(row)
            case ReduceOp.BOR:
                total.bitwise_or_(row)
            case ReduceOp.BXOR:
                total.bitwise_xor_(row)
            case _:
                raise AssertionError(op)  # `reduces` has rejected the op
    return total.div_(len(rows)) if op is ReduceOp.AVG else total
