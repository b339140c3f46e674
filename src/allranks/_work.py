"""Work: the handle of a call that may still be running."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks._errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Complete", "Then", "Together", "Work", "end_futures", "seconds_of"]


_completing: set[threading.Thread] = set()  # futures
_LEAVING_S = 2.0

_LONGEST_S = 1e8  # three years; clocks count in 64 bits of nanoseconds


def seconds_of(timeout: timedelta | float) -> float:
    """A timeout given as torch gives it (timedelta) or as a number of seconds."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return min(seconds, _LONGEST_S)


def end_futures() -> None:
    """Waits for the threads of futures, at exit: one that meets the end of the interpreter in torch aborts it."""
    deadline = time.monotonic() + _LEAVING_S
    for thread in tuple(_completing):
        thread.join(max(0.0, deadline - time.monotonic()))


class Work(abc.ABC):
    """What an asynchronous call (``async_op=True``, ``isend``, ``irecv``) returns.

    Until it is complete its tensors must neither be read nor written.
    """

    @abc.abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the call is complete and its tensors hold their results.

        Args:
            timeout: a limit for this wait; None or zero: the group's timeout decides.

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

    @abc.abstractmethod
    def _results(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""

    def result(self) -> list[torch.Tensor]:
        """Waits; returns the tensors that the call has written."""
        self.wait()
        return self._results()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """``wait`` by torch's other name."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``result()``.

        Cost:
            a thread of its own, because a callback may wait for other work.
        """
        import torch

        # On whose streams who waits for the future comes after the call.
        gpus: list[int | str | torch.device] = list({t.device for t in self._results() if t.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=gpus)

        def complete() -> None:
            try:
                tensors = self.result()
            except Exception as error:  # noqa: BLE001 - it is the future's to raise
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
            else:
                future.set_result(tensors)
            _completing.discard(thread)

        thread = threading.Thread(target=complete, name="allranks-future", daemon=True)
        _completing.add(thread)
        thread.start()
        return future


class Then(Work):
    """A call, and what is to be done when it has ended well: once, by whoever first waits or asks."""

    def __init__(self, work: Work, then: Callable[[], None], results: list[torch.Tensor]) -> None:
        self._work = work
        self._then: Callable[[], None] | None = then
        self._written = results  # by ``then``
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._work.wait(timeout)
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

    def _results(self) -> list[torch.Tensor]:
        return self._written


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


class Complete(Work):
    """A call that was complete when it returned."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self._written = results

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def source_rank(self) -> int:
        raise UsageError("source_rank: not a message")

    def _results(self) -> list[torch.Tensor]:
        return self._written
