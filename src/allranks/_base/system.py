"""Errors of the operating system: limits of open files, memory, processes, disk space.

An ``OSError`` from an inner function contains little more than a number. `refusals` converts it into a `ConfigError`
that states what failed and which limit to check.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
from collections.abc import Iterator

from allranks._base.errors import AllranksError, ConfigError

__all__ = ["reason", "refusal", "refusals"]

_ADVICE = {
    errno.EMFILE: "This process has as many open files as it may: raise `ulimit -n`, or close some",
    errno.ENFILE: "This host has as many open files as it may: `sysctl fs.file-max`",
    errno.ENOMEM: "No memory is left on this host, in the job's cgroup, or below `ulimit -v`",
    errno.EAGAIN: "There are as many processes as there may be: `ulimit -u`, or the cgroup's pids.max",
    errno.ENOSPC: "A file system, /dev/shm perhaps, or a limit of the kernel is full: `df -h`",
    errno.EDQUOT: "This user has no room left on a file system: `quota`",
    errno.EACCES: "Something does not permit it: permissions, or a sandbox such as SELinux",
    errno.EPERM: "Something does not permit it: a limit of this user, or a sandbox such as seccomp",
    errno.EADDRINUSE: "Another process uses the address, or all ports are in use: `ss -tlnp`",
    errno.EROFS: "The file system is mounted for reading only",
    errno.EIO: "A disk or a file system is faulty: `dmesg`",
}


def reason(error: BaseException) -> str:
    """Return the system's text of an error, in a few words."""
    if isinstance(error, builtins.TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or error).lower()


def refusal(what: str, error: OSError | MemoryError) -> str:
    """Return a text that states what failed, the reason, and what to check."""
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, "out of memory")
    why = (error.strerror or str(error)).lower()
    path = f" ({error.filename})" if isinstance(error.filename, str) and error.filename else ""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{what}: {why}{path}" + (f".\n  {advice}" if advice else "")


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Convert errors of the system in this block into a ConfigError.

    Args:
        what: The consequence, for example ``"group 'world' cannot be made"``.

    Raises:
        ConfigError: The system has refused a request.
    """
    try:
        yield
    except AllranksError:  # some of them are an OSError, too
        raise
    except (OSError, MemoryError) as error:
        raise ConfigError(refusal(what, error)) from error
