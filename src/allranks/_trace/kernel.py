"""The kernel's data about a thread of this host: its state, and the system call in which it is blocked."""

from __future__ import annotations

import contextlib
import os

import msgspec

__all__ = ["KernelWait", "kernel_wait", "memory_files", "process_state"]

# Numbers of the system calls in which programs block, by architecture (asm/unistd.h).
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 3: "close", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
        47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 57: "close", 63: "read", 64: "write", 65: "readv",
        66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync",
        83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept",
        203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}.get(os.uname().machine, {})  # fmt: skip

# Their first argument is a descriptor.
_WITH_DESCRIPTOR = frozenset((
    "read", "write", "close", "pread64", "pwrite64", "readv", "writev", "connect", "accept", "accept4", "sendto",
    "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync", "fdatasync",
))  # fmt: skip


class KernelWait(msgspec.Struct, frozen=True):
    """The system call in which a thread is blocked.

    Attributes:
        call: Name of the system call, such as ``futex``. "" if the thread runs or the call is unknown.
        file: The file, socket or pipe of the call. "" if it has none.
        descriptor: The descriptor of ``file``. -1 if the call has none.
        channel: The kernel function in which the thread waits, such as ``pipe_read``. "" if it may not be read.
    """

    call: str = ""
    file: str = ""
    descriptor: int = -1
    channel: str = ""

    def describe(self) -> str:
        """Return the wait as a phrase, such as ``blocked in a lock``; "" if the thread runs or the call is unknown."""
        if not self.call:
            return ""
        where = f" (kernel: {self.channel})" if self.channel else ""
        if self.file:
            return f"blocked in {self.call} of {self.file}{where}"
        phrase = next((phrase for part, phrase in _PHRASES if part in self.call), f"blocked in {self.call}")
        return f"{phrase}{where if phrase.startswith('blocked in') and 'futex' not in self.call else ''}"


# The reason for a wait, by a part of the name of the system call.
_PHRASES = (
    ("futex", "blocked in a lock"),
    ("nanosleep", "in a timer"),
    ("wait4", "waiting for a child process"),
    ("waitid", "waiting for a child process"),
    ("poll", "waiting for input"),
    ("select", "waiting for input"),
    ("epoll", "waiting for input"),
)


def kernel_wait(pid: int, thread: int = 0) -> KernelWait:
    """Return the system call in which a thread is blocked; an empty value if this process may not read it.

    Args:
        pid: The process.
        thread: The thread, as the kernel numbers it. 0: the main thread.
    """
    folder = f"/proc/{pid}/task/{thread or pid}"
    try:
        with open(f"{folder}/syscall") as file:
            words = file.read().split()
        with open(f"{folder}/wchan") as file:
            channel = file.read().strip("0\n")
    except OSError:
        return KernelWait()
    if not words or not words[0].isdecimal():  # "running", or -1: blocked outside of a system call
        return KernelWait(channel=channel)
    call = _CALLS.get(int(words[0]), f"system call {words[0]}")
    if call not in _WITH_DESCRIPTOR:
        return KernelWait(call, channel=channel)
    descriptor = int(words[1], 16)
    try:
        name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        name = f"descriptor {descriptor}"
    return KernelWait(call, name, descriptor, channel)


def process_state(pid: int) -> str:
    """Return the state of a process, as a word, as the kernel reports it."""
    try:
        with open(f"/proc/{pid}/status", errors="surrogateescape") as file:
            status = dict(line.rstrip("\n").partition(":\t")[::2] for line in file)
    except OSError:
        return "gone"
    if int(status.get("TracerPid", "0")):
        return "being debugged"
    states = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "being debugged"}
    return states.get(status.get("State", "")[:1], "gone")


def memory_files(pid: int, name: str) -> list[str]:
    """Return the paths of the memory files that a process of this host has created, if their name begins with ``name``.

    A process that reads the memory file of another one has it open, too, for a moment. It is not its creator: it opens
    the file for reading only.

    Raises:
        OSError: The process has exited, or belongs to another user.
    """
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(FileNotFoundError):  # the process has closed it
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                continue
            with open(f"/proc/{pid}/fdinfo/{number}") as file:
                info = dict(line.split(":", 1) for line in file if ":" in line)
            if int(info["flags"], 8) & os.O_ACCMODE == os.O_RDWR:
                found.append(path)
    return found
