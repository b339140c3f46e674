"""torch's Work around a Work of allranks.

torch's C++ calls two methods of a Work, ``wait`` and ``get_future``. DistributedDataParallel waits for futures at the
end of backward, in C++. There an error of allranks would become a RuntimeError, and Ctrl-C would have no effect.
Futures that are requested within a backward are therefore completed here, in a callback of that backward, which runs
before DistributedDataParallel's own callback.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from allranks._base.errors import AllranksError
from allranks._call.work import Complete
from allranks._engines.native.engine import work_of

if TYPE_CHECKING:
    from allranks._call.work import Work
    from allranks._core import Started

__all__ = ["DONE", "TorchWork", "finish_all", "finished_futures"]

# torch's annotations cover little of the API that is used here.
_torch: Any = torch
_c10d: Any = torch.distributed
_WAITS = {"words": "Operation timed out!"}  # gloo's text if a wait with its own timeout times out
_BACKWARD = _engine_run_backward.__code__


class TorchWork(_c10d.Work):  # type: ignore[misc]
    """A call of allranks in the form that torch's C++ and Python use.

    ``of`` and ``begun`` create it, because a constructor would take longer. If the core has started a call by itself, a
    Work of allranks is created only when the program needs more than to wait for it.
    """

    __slots__ = ("_calls", "_future", "_made", "_note", "_started", "_waited")

    _calls: Any
    _future: Any
    _made: Work
    _note: Callable[..., None] | None
    _started: Started | None
    _waited: bool

    @staticmethod
    def of(work: Work, note: Callable[..., None] | None = None) -> TorchWork:
        """Wrap a Work. ``note`` is called with the error of the call, and ``words`` if gloo's text depends on it."""
        made = TorchWork()
        made._made = work
        made._note = note
        made._started = made._future = None
        made._waited = type(work) is Complete
        return made

    @staticmethod
    def begun(call: Started, calls: Any) -> TorchWork:
        """Wrap a started call among the ``Calls`` of a group."""
        made = TorchWork()
        made._started = call
        made._calls = calls
        made._waited = False
        made._future = None
        return made

    @property
    def _work(self) -> Work:
        if self._started is not None:
            self._made = work_of(self._started, self._calls.group.size())
            self._note = self._calls.note
            self._started = None
        return self._made

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._started is not None and not timeout:
            try:
                # -1: no limit of this wait, so the group's timeout applies.
                self._started.wait(-1.0)
            except AllranksError:
                pass  # the Work of allranks keeps the error, and raises it again
            else:
                self._waited = True
                return True
        try:
            self._waited = self._work.wait(timeout or None)
        except AllranksError as error:
            if self._note is not None:
                self._note(error, **_WAITS if timeout else {})
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> Any:
        if self._future is None:
            # Within a backward, no decision may depend on the progress of the call, which differs between ranks.
            if self._waited or _unfinished.no_more:
                self._future = _future_of(self._work.result())
            elif _torch._C._current_autograd_node() is not None:
                self._future = _AtEndOfBackward(self._work)
                _unfinished.futures.append(self._future)
                # Queued now, so that it runs before DistributedDataParallel's own callback, which waits in C++.
                Variable._execution_engine.queue_callback(_finish)
            elif _in_callback_of_backward():
                self._future = _future_of(self._work.result())  # the caller waits next
            elif self._work.is_success():
                self._future = _future_of(self._work.result())
            else:
                self._future = self._work.get_future()
        return self._future


class _AtEndOfBackward(torch.futures.Future):  # type: ignore[type-arg]
    """A future that completes when backward ends, or when a thread waits for it earlier.

    Callbacks then run in this thread, in the order of the calls. Callbacks that make calls themselves (PowerSGD's)
    therefore make them in the same order on every rank. With one thread per callback, the order would differ.
    """

    def __init__(self, work: Work, first: _AtEndOfBackward | None = None) -> None:
        """Create a future. ``first`` is the future whose callback completes this one."""
        super().__init__()
        self._work = work
        self._first = first or self
        self._failure: Exception | None = None

    def finish(self) -> None:
        first = self._first
        if not first.done():
            first.set_result(first._work.result())
        if first._failure is not None:
            raise first._failure

    def wait(self) -> Any:
        self.finish()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = _AtEndOfBackward(self._work, self._first)

        def run(done: Any) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:  # noqa: BLE001 - the waiting thread receives any exception
                self._first._failure = error
                following.set_exception(error)

        self.add_done_callback(run)
        return following


class _Unfinished(threading.local):
    def __init__(self) -> None:
        self.futures: list[_AtEndOfBackward] = []
        self.no_more = False


_unfinished = _Unfinished()


def _finish() -> None:
    """Complete the futures at the end of a backward.

    In a nested backward, this includes futures that the outer backward has requested, because C++ waits there.
    """
    try:
        for future in _unfinished.futures:
            future.finish()
    finally:
        # Also after an error: futures of a failed backward must not complete in the next one.
        _unfinished.futures.clear()


@contextlib.contextmanager
def finished_futures() -> Iterator[None]:
    """Complete futures that C++ requests in this context: waiting for C++'s derived futures would not complete them."""
    before, _unfinished.no_more = _unfinished.no_more, True
    try:
        yield
    finally:
        _unfinished.no_more = before


def finish_all(futures: Iterable[Any]) -> None:
    """Complete those of the futures that would otherwise complete only at the end of backward."""
    for future in futures:
        if isinstance(future, _AtEndOfBackward):
            future.finish()


def _in_callback_of_backward() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return frame is not None


def _future_of(tensors: list[torch.Tensor]) -> Any:
    """Return a complete future that C++ sees as a list of tensors. With set_result it would be of any object."""
    if tensors:
        return _torch._C.fork(lambda: tensors)
    empty: Any = _torch.futures.Future()
    empty.set_result([])
    return empty


class _Done(TorchWork):
    """The Work of calls that were complete when they returned."""

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


DONE = _Done()
DONE._made = Complete([])
DONE._started = DONE._future = None
DONE._waited = True
"""The Work of calls that were complete when they returned."""
