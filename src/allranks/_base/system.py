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
    errno.EMFILE: "Raise `ulimit -n` or close files: this process has reached its limit of open files",
    errno.ENFILE: "Raise `sysctl fs.file-max`: this host has reached its limit of open files",
    errno.ENOMEM: "Check the free memory of this host, the memory limit of the job's cgroup, and `ulimit -v`",
    errno.EAGAIN: "Check `ulimit -u` and the cgroup's pids.max: the limit of processes is reached",
    errno.ENOSPC: "Check `df -h`: a file system, possibly /dev/shm, is full, or a limit of the kernel is reached",
    errno.EDQUOT: "Check `quota`: this user has no space left on a file system",
    errno.EACCES: "Check the permissions, and sandboxes such as SELinux",
    errno.EPERM: "Check the limits of this user, and sandboxes such as seccomp",
    errno.EADDRINUSE: "Check `ss -tlnp`: another process uses the address, or all ports are in use",
    errno.EROFS: "Check `mount`: the file system is mounted read-only",
    errno.EIO: "Check `dmesg`: a disk or a file system is faulty",
}


def reason(error: BaseException) -> str:
    """Return the system's text of an error, in a few words."""
    if isinstance(error, builtins.TimeoutError):
        # A timeout of a socket has no error number and no system text.
        return "no answer"
    return _within_sentence(str(getattr(error, "strerror", None) or error))


def refusal(what: str, error: OSError | MemoryError) -> str:
    """Return a text that states what failed, the reason, and what to check."""
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, "out of memory")
    why = _within_sentence(error.strerror or str(error))
    # `filename` of an OSError can also be a descriptor.
    path = f" ({error.filename})" if isinstance(error.filename, str) and error.filename else ""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{what}: {why}{path}" + (f".\n  {advice}." if advice else "")


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


def _within_sentence(text: str) -> str:
    """Return the text without the capital of its first word. Names, paths and abbreviations stay as they are."""
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
