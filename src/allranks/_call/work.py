"""Work: the handle of a call that may still be running."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from allranks._base.errors import UsageError
from allranks._base.forks import forks, refusal
from allranks._base.public import publish
from allranks._call.futures import End, future_of

if TYPE_CHECKING:
    import torch

__all__ = ["Complete", "Then", "Together", "Work"]


class Work(abc.ABC):
    """What an asynchronous call (``async_op=True``, ``isend``, ``irecv``) returns.

    Until it is complete its tensors must neither be read nor written.
    """

    shown: Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]] = ()
    """What ``result`` returns; set by who has made the call."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a work belongs to its process and cannot be pickled or copied: wait for it, and pass its result"
        )

    @abc.abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the call is complete and its tensors hold their results.

        Args:
            timeout: a limit for this wait, a timedelta or seconds; None or zero: the group's timeout decides; below
                zero: it has passed, as what is left until a deadline may have.

        Returns:
            True.

        Raises:
            TimeoutError: ``timeout`` has passed; the call goes on and may be waited for again.
            AllranksError: the call failed.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Whether the call has ended, well or not. If True, ``wait`` does not block."""

    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """The error of a call that has ended and failed, else None."""

    @abc.abstractmethod
    def source_rank(self) -> int:
        """The rank that sent, of an ``irecv`` that is complete (in the group's numbering)."""

    def _source_rank(self) -> int:
        return self.source_rank()  # torch's own name for it

    def _results(self) -> list[torch.Tensor]:
        """The call's tensors; of what it writes, once it is complete."""
        return list(self.shown() if callable(self.shown) else self.shown)

    def end(self, ticket: int) -> End:
        """How the end of the call is noticed; where the core reports it, by this ticket."""
        return End.PAST if self.is_completed() else End.ASKED

    def result(self) -> list[torch.Tensor]:
        """Waits; returns the call's tensors, those that it has written: as torch's gloo, for each verb.

        On ranks that a call writes nothing to (``reduce``'s others) these are what they gave; of ``gather``'s, none.
        """
        self.wait()
        return self._results()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """``wait`` by torch's other name."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``result()``. Callbacks of a future run in the order in which they were added to it.

        They run in a thread that completes one future after the other, in the order in which the calls have ended, or
        in one that waits for the future. After 0.1 s a callback does not hold up the others: a further thread goes on.

        Cost:
            a few microseconds. Two threads, however many futures there are; one more for each callback that blocks.
        """

        # On whose streams who waits for the future comes after the call.
        gpus = list({tensor.device for tensor in self._results() if tensor.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = future_of(self, gpus)
        return future


class Then(Work):
    """A call, and what is to be done when it has ended well: once, by whoever first waits or asks."""

    def __init__(self, work: Work, then: Callable[[], None], results: list[torch.Tensor]) -> None:
        self._work = work
        self._then: Callable[[], None] | None = then
        self.shown = results  # written by ``then``
        self._lock = threading.Lock()
        self._forks = forks()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._work.wait(timeout)
        if self._then is None:
            return True
        if self._forks != forks():
            raise refusal("a work of the parent process: it")
        with self._lock:
            if self._then is not None:
                self._then()
                self._then = None
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._work.exception() is None:
            self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def end(self, ticket: int) -> End:
        return self._work.end(ticket)


class Together(Work):
    """Several calls as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def source_rank(self) -> int:
        raise UsageError("source_rank: not a message")

    def _results(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work._results()]

    def end(self, ticket: int) -> End:
        return next((end for end in (work.end(ticket) for work in self._works) if end is not End.PAST), End.PAST)


class Complete(Work):
    """A call that was complete when it returned."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self.shown = results

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def source_rank(self) -> int:
        raise UsageError("source_rank: not a message")


publish(globals())
