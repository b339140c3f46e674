"""How rank 0 tells the other ranks one text over PMIx, which Open MPI's launcher serves.

PMIx has no protocol that is written down, only a library, libpmix; mpirun's own daemon, an ancestor of this process,
has the right one loaded, and ``/proc`` says where it lies. A process that has used it cannot start Open MPI any more,
and one that has not taken its leave of it is taken for a crash. So a small process of its own uses it, in the place of
the rank, and is gone when the ranks have met (20 ms). This file is what that process runs, too, alone: it imports
nothing of the package at its head.

Rank 0's process stays until the meeting is over: what it has posted goes when it goes.

Source: the PMIx 4 standard; the layout of its structures from pmix_common.h (PMIx 4 and 5).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["PmixBoard"]

_GLOBAL, _STRING, _INT = 3, 3, 6  # PMIX_GLOBAL, PMIX_STRING, PMIX_INT
_TRY_S = 2  # PMIx' own timeout for a text that is not there yet
_POSTED = "posted"
_ABSENT = (-24, -46, -25)  # PMIX_ERR_TIMEOUT, _NOT_FOUND, _UNREACH: rank 0 has not come yet


class PmixBoard:
    """Where rank 0 posts one text that all ranks read.

    Args:
        number: how many boards there were before: the same on all ranks.
    """

    def __init__(self, number: int) -> None:
        self._key = f"allranks-{number}"
        self._text: str | None = None
        self._heard = b""
        self._process: subprocess.Popen[bytes] | None = None

    def post(self, text: str) -> None:
        """Posts the text, which has neither spaces nor line ends. By rank 0 only, before it reads.

        Raises:
            ConfigError: PMIx does not answer.
        """
        self._start(text)
        if self._hear(60.0) is None:
            raise self._trouble("it did not answer for 60 s")
        self._text = text

    def read(self, patience_s: float) -> str | None:
        """Waits for rank 0 to post; None if it has not after that time: to be called again.

        Raises:
            ConfigError: PMIx does not answer.
        """
        if self._text is None:
            if self._process is None:
                self._start("")
            self._text = self._hear(patience_s)
        return self._text

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:  # it waits for rank 0, which did not come
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self, text: str) -> None:
        # Alone: this file's folder is not searched for modules. The text is no argument, as those are for all to see.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._key]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())

    def _hear(self, patience_s: float) -> str | None:
        """What was posted; lines before that are PMIx' own, and tell why nothing is where it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience_s
        while select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self._process.stdout.fileno(), 4096)
            if not data:
                said = self._heard.decode(errors="replace").strip().splitlines()
                raise self._trouble(said[-1] if said else "its process ended")
            self._heard += data
            for line in self._heard.decode(errors="replace").splitlines(keepends=True):
                if line.startswith(f"{_POSTED} ") and line.endswith("\n"):
                    return line.split()[1]
        return None

    def _trouble(self, why: str) -> Exception:
        from allranks._errors import ConfigError

        return ConfigError(
            f"Open MPI's mpirun started this job, but its PMIx cannot be used for the ranks to meet: {why}.\n"
            "  Set MASTER_ADDR and MASTER_PORT, the same on all ranks (mpirun -x MASTER_ADDR=node0 -x"
            " MASTER_PORT=29500): they meet there instead."
        )


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("integer", ctypes.c_int), ("room", ctypes.c_uint64 * 3))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


def _library() -> str:
    """The libpmix of the daemon that started the rank, else the system's."""
    pid = os.getppid()
    while pid > 1:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # another user's, or just gone
            break
        for line in maps.splitlines():
            if "/libpmix.so" in line:
                return line.split(maxsplit=5)[5]
    return ctypes.util.find_library("pmix") or "libpmix.so.2"


def _main(parent: int, key: bytes) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no longer than the rank
    if os.getppid() != parent:
        return
    pmix, me = ctypes.CDLL(_library()), _Proc()
    _check("PMIx_Init", pmix.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0)))
    text = sys.stdin.readline().strip().encode()
    if text:
        value = _Value(_STRING, _Data(string=text))
        _check("PMIx_Put", pmix.PMIx_Put(ctypes.c_uint8(_GLOBAL), key, ctypes.byref(value)))
        _check("PMIx_Commit", pmix.PMIx_Commit())
    else:
        text = _get(pmix, _Proc(me.nspace, 0), key)
    print(_POSTED, text.decode(), flush=True)
    sys.stdin.read()  # until the meeting is over
    _check("PMIx_Finalize", pmix.PMIx_Finalize(None, ctypes.c_size_t(0)))


def _get(pmix: ctypes.CDLL, root: _Proc, key: bytes) -> bytes:
    patience = _Info(b"pmix.timeout", 0, _Value(_INT, _Data(integer=_TRY_S)))
    found = ctypes.POINTER(_Value)()
    while not select.select([sys.stdin], [], [], 0)[0]:  # given up
        began = time.monotonic()
        said = pmix.PMIx_Get(ctypes.byref(root), key, ctypes.byref(patience), ctypes.c_size_t(1), ctypes.byref(found))
        if said == 0:
            return bytes(found.contents.data.string)
        if said not in _ABSENT:
            _check("PMIx_Get", said)
        time.sleep(max(0.0, 0.1 - (time.monotonic() - began)))
    sys.exit(0)


def _check(call: str, said: int) -> None:
    if said != 0:
        sys.exit(f"{call} returned {said}")


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2].encode())
