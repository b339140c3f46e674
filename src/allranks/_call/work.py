"""Work: the handle of a call that may still run."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from allranks._base.errors import UsageError
from allranks._base.forks import forks, refusal
from allranks._base.public import publish
from allranks._base.timeouts import SHORTEST_S, seconds_of
from allranks._call.futures import End, future_of

if TYPE_CHECKING:
    import torch

__all__ = ["CallWithTimeout", "Complete", "Then", "Together", "Work"]


class Work(abc.ABC):
    """The handle that an asynchronous call (``async_op=True``, ``isend``, ``irecv``) returns.

    The program must neither read nor write the tensors of the call until the work is complete.
    """

    shown: Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]] = ()
    """The tensors that ``result`` returns, or a function that returns them. The code that starts the call sets it."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a work belongs to its process and cannot be pickled or copied.\n  Wait for it, and pass its result."
        )

    @abc.abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the call is complete and its tensors contain the results.

        Args:
            timeout: Limit of this wait, a timedelta or seconds. None or zero: the group's timeout applies. A negative
                value counts as expired; it results, for example, from a deadline in the past.

        Returns:
            True.

        Raises:
            TimeoutError: ``timeout`` has expired. The call continues, and the caller may wait for it again.
            AllranksError: The call failed.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Return whether the call has finished, with or without success. If True, ``wait`` does not block."""

    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """Return the error of a call that has finished and failed, otherwise None."""

    @abc.abstractmethod
    def source_rank(self) -> int:
        """Return the rank of the sender (in the group's numbering) of an ``irecv`` that is complete."""

    def _source_rank(self) -> int:
        return self.source_rank()  # torch's name of the method

    def _results(self) -> list[torch.Tensor]:
        """Return the tensors of the call. The tensors that it writes are valid once it is complete."""
        return list(self.shown() if callable(self.shown) else self.shown)

    def end(self, ticket: int) -> End:
        """Return how the completion is detected. If the core reports it, it reports this ticket."""
        return End.PAST if self.is_completed() else End.POLLED

    def result(self) -> list[torch.Tensor]:
        """Wait for the call, and return the tensors that it has written: for each verb the same as torch's gloo.

        On ranks without an output (in ``reduce``, all except the root) these are the input tensors. In ``gather``, the
        ranks without an output return no tensors.
        """
        self.wait()
        return self._results()

    def is_success(self) -> bool:
        """Return whether the call has finished with success."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Wait for the call. The same as ``wait``, under another name of torch's."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of ``result()``. Callbacks of a future run in the order in which they were added to it.

        They run in a thread that completes the futures one by one, in the order in which the calls have finished, or in
        a thread that waits for the future. A callback that takes more than 0.1 s does not delay the other futures:
        another thread continues with them.

        Cost:
            A few microseconds. Two threads for any number of futures, and one more for each callback that blocks.
        """

        # torch makes the current streams of these GPUs wait for the call when a caller waits for the future.
        gpus = list({tensor.device for tensor in self._results() if tensor.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = future_of(self, gpus)
        return future


class Then(Work):
    """A call with a function that runs once after its success, in the first thread that waits for it or polls it."""

    def __init__(self, work: Work, then: Callable[[], None], results: list[torch.Tensor]) -> None:
        self._work = work
        self._then: Callable[[], None] | None = then
        self.shown = results  # ``then`` writes them
        self._lock = threading.Lock()
        self._forks = forks()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._work.wait(timeout)
        if self._then is None:
            return True
        if self._forks != forks():
            raise refusal("wait: the work")
        with self._lock:  # after the check above: in a forked child, a thread of the parent may have held the lock
            if self._then is not None:
                self._then()
                # Cleared after success, so that an interrupted function runs again in the next wait.
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


class CallWithTimeout(Then):
    """A call with its own timeout, in seconds, which starts at the call."""

    def __init__(self, work: Work, limit_s: float) -> None:
        super().__init__(work, lambda: None, work._results())
        self._until = time.monotonic() + limit_s

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return super().wait(timeout or max(self._until - time.monotonic(), SHORTEST_S))


class Together(Work):
    """Several calls as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if timeout is None or seconds_of(timeout) <= 0:  # see `Work.wait`
            return all(work.wait(timeout) for work in self._works)
        deadline = time.monotonic() + seconds_of(timeout)
        return all(work.wait(max(deadline - time.monotonic(), SHORTEST_S)) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def source_rank(self) -> int:
        raise UsageError("source_rank: this work does not belong to a message.\n  Call it on the work of irecv().")

    def _results(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work._results()]

    def end(self, ticket: int) -> End:
        # The first incomplete call decides. The watcher calls this method again when that call is complete.
        return next((end for end in (work.end(ticket) for work in self._works) if end is not End.PAST), End.PAST)


class Complete(Work):
    """The work of a call that was complete when it returned."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self.shown = results

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def source_rank(self) -> int:
        raise UsageError("source_rank: this work does not belong to a message.\n  Call it on the work of irecv().")


publish(globals())
