"""torch's Work around ours.

torch's C++ asks a Work for two things, ``wait`` and ``get_future``. DistributedDataParallel waits for futures at the
end of backward, in C++, where an error of ours would become a RuntimeError and Ctrl-C would not be heard. Works whose
future is asked for within a backward are therefore waited for here too, in a callback of that backward, which comes
before DistributedDataParallel's own.
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
            frame = sys._getframe().f_back  # None where no Python called
            by_torch = frame is not None and frame.f_code is _BACKWARD
            within = _torch._C._current_autograd_node() is not None
            if by_torch and within:
                # C++ does not wait before the callbacks: nobody else need complete it.
                self._future = torch.futures.Future()
                Variable._execution_engine.queue_callback(self._complete)
            elif by_torch:
                # In a callback already: C++ waits next.
                self._future = torch.futures.Future()
                self._complete()
            else:
                self._future = self._work.get_future()
                if within:
                    Variable._execution_engine.queue_callback(self.synchronize)
        return self._future

    def _complete(self) -> None:
        self._future.set_result(self._work.result())


DONE = TorchWork(Complete([]))
"""Of calls that were complete when they returned."""
