"""Work: the handle of a call that may still be running."""

from __future__ import annotations

import abc
from datetime import timedelta

__all__ = ["Work", "seconds_of"]


def seconds_of(timeout: timedelta | float) -> float:
    """A timeout given as torch gives it (timedelta) or as a number of seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


class Work(abc.ABC):
    """What an asynchronous call (``async_op=True``) returns.

    Until it is complete the tensor must neither be read nor written.
    """

    @abc.abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the call is complete and the tensor holds its result.

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

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None
