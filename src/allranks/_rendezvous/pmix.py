"""Lookup of rank 0's host by PMIx, which Open MPI's launcher serves.

Open MPI gives a rank only its own host name, and no variable contains more. PMIx has no documented wire protocol, only
a library, libpmix. mpirun's own daemon is an ancestor of this process and has loaded the right library. ``/proc`` shows
its path. A process that has used libpmix cannot start Open MPI any more, and a process that has not finalized it counts
as crashed. A short-lived child process (20 ms) therefore uses it in the name of the rank. The child runs this file as a
script, so the file imports no module of the package at its top.

The child only requests data that the daemon on this host already has. A text that ranks post for each other (PMIx_Put)
is not reliable without PMIx's barrier: if it is requested too early, PRRTE 3 fails or hangs between hosts.

Source: the PMIx 4 standard; the layout of its structures from pmix_common.h (PMIx 4 and 5).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["host_of_rank_0"]

_PATIENCE_S = 30.0  # seconds for the child process
_ANSWER = "host: "
_STRING = 3  # PMIX_STRING


@functools.cache
def host_of_rank_0() -> str:
    """Return the name of the host on which rank 0 of this Open MPI job runs.

    Raises:
        ConfigError: PMIx does not provide it.
    """
    # Isolated mode: otherwise Python would search the folder of this file, a folder of the package, for modules.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    try:
        # stderr included: if the child fails, its last line is the reason in the error below.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_PATIENCE_S
        )
        lines = done.stdout.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired:
        lines = [f"it did not answer for {_PATIENCE_S:g} s"]
    for line in lines:
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER)
    from allranks._base.errors import ConfigError

    raise ConfigError(
        "Open MPI's mpirun started this job, but its PMIx server does not provide the host of rank 0:"
        f" {lines[-1] if lines else 'the process that sent the request exited'}.\n"
        "  Set MASTER_ADDR and MASTER_PORT, the same on all ranks (mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500),"
        " to join without PMIx."
    )


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 2))


def _library() -> str:
    """Return the libpmix of the daemon that started the rank, else that of the system."""
    pid = os.getppid()
    while pid > 1:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="surrogateescape").rpartition(")")[2].split()[1])
        except OSError:  # it belongs to another user, or has just exited
            break
        for line in maps.splitlines():
            if "/libpmix.so" in line:
                return line.split(maxsplit=5)[5]
    return ctypes.util.find_library("pmix") or "libpmix.so.2"


def _main(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the child must not outlive the rank
    # The rank may have exited before the request took effect.
    if os.getppid() != parent:
        return
    pmix, me, found = ctypes.CDLL(_library()), _Proc(), ctypes.POINTER(_Value)()
    nothing = (None, ctypes.c_size_t(0))
    _check("PMIx_Init", pmix.PMIx_Init(ctypes.byref(me), *nothing))
    root = _Proc(me.nspace, 0)
    status = pmix.PMIx_Get(ctypes.byref(root), b"pmix.hname", *nothing, ctypes.byref(found))
    if status == 0 and found.contents.type == _STRING:
        print(f"{_ANSWER}{found.contents.string.decode()}", flush=True)
    # Also after a failed lookup, because the daemon treats a process without PMIx_Finalize as crashed.
    _check("PMIx_Finalize", pmix.PMIx_Finalize(*nothing))
    _check("PMIx_Get", status)


def _check(call: str, status: int) -> None:
    if status != 0:
        sys.exit(f"{call} returned {status}")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
