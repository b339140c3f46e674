"""torch's Work around ours.

torch's C++ asks a Work for two things, ``wait`` and ``get_future``. DistributedDataParallel waits for futures at the
end of backward, in C++, where an error of ours would become a RuntimeError and Ctrl-C would not be heard. Calls that
torch's C++ makes within a backward are therefore waited for here, in a callback of that backward, which comes before
DistributedDataParallel's own: no thread is needed, and errors keep their type.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from allranks._work import Complete

if TYPE_CHECKING:
    from allranks._work import Work

__all__ = ["DONE", "TorchWork"]

# torch's annotations know little of what is used here.
_torch: Any = torch
_c10d: Any = torch.distributed
_BACKWARD = _engine_run_backward.__code__


class TorchWork(_c10d.Work):  # type: ignore[misc]
    """A call of ours as torch's C++ and Python know one."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait(timeout or None)

    def synchronize(self) -> None:
        self._work.wait()

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
            if self._work.is_success():
                self._future = _done(self._work)
            elif not _asked_by_backward():
                self._future = self._work.get_future()
            elif _torch._C._current_autograd_node() is None:
                # In a callback at the end of backward: C++ waits next, before any other callback.
                self._future = _done(self._work)
            else:
                self._future = torch.futures.Future()
                Variable._execution_engine.queue_callback(self._finish)
        return self._future

    def _finish(self) -> None:
        self._future.set_result(self._work.result())


def _asked_by_backward() -> bool:
    """Whether get_future is called by torch's C++, within a backward that runs in this thread."""
    frame = sys._getframe(1).f_back  # None where no Python called
    return frame is not None and frame.f_code is _BACKWARD


def _done(work: Work) -> Any:
    """A complete future, of the type that torch's C++ gives its own: set_result would make it one of any object."""
    tensors = work.result()
    if tensors:
        return _torch._C.fork(lambda: tensors)
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return future


DONE = TorchWork(Complete([]))
"""Of calls that were complete when they returned."""
