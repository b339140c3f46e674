"""Transfer of one text from rank 0 to the other ranks over PMI-1.

The launchers of MPICH, Intel MPI and SLURM implement PMI-1. ``mpiexec`` and ``srun --mpi=pmi2`` pass each process a
connection to their own daemon (PMI_FD). Ranks can therefore exchange addresses without a port, a shared folder or a
secret that the user must set up. Lines of ``name=value`` go in both directions: put, barrier_in, get.

Each process has one connection. It opens for the first rendezvous and stays open until the process exits. A second
"init" would hang SLURM's daemon, and hydra closes the connection after "finalize". Hydra terminates the whole job if a
process exits without "finalize". A process that an uncaught exception terminates therefore does not send it. If MPI is
started later, MPI sends "finalize" itself. From then on the connection belongs to MPI, and this module does not use
it. PMI cannot name missing ranks: its barrier returns when all ranks have entered it.

Source: P. Balaji et al., PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems (2010), and
the replies of MPICH 5.0's hydra and SLURM 22.05's pmi2 plugin.
"""

from __future__ import annotations

import atexit
import itertools
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from allranks._base.errors import ConfigError

__all__ = ["PmiBroadcast", "mpi_runs"]

_PATIENCE_S = 30.0  # seconds to wait for any reply except that of a barrier


def mpi_runs() -> bool:
    """Return whether MPI has been started in this process, by any caller. This check does not import it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


class PmiBroadcast:
    """A text that rank 0 posts and all ranks read. Every rank must read it, including rank 0.

    Args:
        fd: PMI_FD.

    Raises:
        ConfigError: The daemon does not answer, or an earlier barrier of this process has not completed.
    """

    def __init__(self, fd: int) -> None:
        self._server = _connected(fd)
        if self._server.in_barrier:
            raise ConfigError(
                "The ranks of this job cannot use PMI again: not all ranks took part in the previous rendezvous.\n"
                "  Restart the job."
            )
        self._key = f"allranks-{next(self._server.broadcasts)}"
        self._passed = False

    def publish(self, text: str) -> None:
        """Post the text, which contains neither spaces nor line ends. Only rank 0 calls it, before it reads."""
        # The rest of the value holds the number of parts and a dot.
        room = self._server.value_max - 16
        pieces = [text[at : at + room] for at in range(0, len(text), room)]
        for number, piece in enumerate(pieces):
            self._server.put(f"{self._key}-{number}", f"{len(pieces)}.{piece}")

    def read(self, patience_s: float) -> str | None:
        """Wait until all ranks have called this, and return the text. None if the time is over: call again."""
        # PMI counts every entry into its barrier, so a second call of `read` must not enter again.
        if not self._passed:
            self._passed = self._server.barrier(time.monotonic() + patience_s)
        if not self._passed:
            return None
        count, _, text = self._server.get(f"{self._key}-0").partition(".")
        return text + "".join(self._server.get(f"{self._key}-{n}").partition(".")[2] for n in range(1, int(count)))


class _Server:
    """The daemon of the launcher, at the other end of PMI_FD."""

    def __init__(self, fd: int) -> None:
        self.pid = os.getpid()
        self.broadcasts: Iterator[int] = itertools.count()
        self.in_barrier = False
        self._fd = fd
        self._buffer = b""
        self._request("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
        self.value_max = int(self._request("cmd=get_maxes", "maxes")["vallen_max"])
        self._space = self._request("cmd=get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        self._request(f"cmd=put kvsname={self._space} key={key} value={value}", "put_result")

    def get(self, key: str) -> str:
        return self._request(f"cmd=get kvsname={self._space} key={key}", "get_result")["value"]

    def barrier(self, deadline: float) -> bool:
        """Wait in the barrier. Return False if it is not complete at the deadline; the caller must then call again."""
        if not self.in_barrier:
            # It stays set after a timeout, because PMI has no request to leave a barrier.
            self.in_barrier = True
            self._send_line("cmd=barrier_in")
        line = self._receive_line(deadline)
        if line is None:
            return False
        self.in_barrier = False
        _checked(line, "barrier_out", "cmd=barrier_in")
        return True

    def finalize(self) -> None:
        self._request("cmd=finalize", "finalize_ack")

    def _request(self, request: str, reply: str) -> dict[str, str]:
        self._send_line(request)
        line = self._receive_line(time.monotonic() + _PATIENCE_S)
        if line is None:
            raise _pmi_error(f"no answer to {request.partition(' ')[0]!r} in {_PATIENCE_S:g} s")
        return _checked(line, reply, request.partition(" ")[0])

    def _send_line(self, line: str) -> None:
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _pmi_error(str(error.strerror)) from None

    def _receive_line(self, deadline: float) -> str | None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while b"\n" not in self._buffer:
            try:
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return None
                data = os.read(self._fd, 4096)
            except OSError as error:
                raise _pmi_error(str(error.strerror)) from None
            if not data:
                raise _pmi_error("it closed the connection")
            self._buffer += data
        # The rest stays for the next call. A deadline can also expire in the middle of a line.
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")


def _checked(line: str, reply: str, request: str) -> dict[str, str]:
    answer = dict(word.split("=", 1) for word in line.split() if "=" in word)
    if answer.get("cmd") != reply or answer.get("rc", "0") != "0":
        raise _pmi_error(f"it answered {line!r} to {request!r}")
    return answer


def _pmi_error(why: str) -> ConfigError:
    return ConfigError(
        f"PMI_FD={os.environ.get('PMI_FD', '')}: the launcher of this job does not serve PMI-1 on this descriptor:"
        f" {why}.\n"
        "  Set MASTER_ADDR and MASTER_PORT, the same on all ranks, to join without PMI."
    )


_server: _Server | None = None


def _connected(fd: int) -> _Server:
    """Return the connection of this process. A forked child must not use the connection of its parent."""
    global _server
    if _server is None:
        _server = _Server(fd)
        # Hydra terminates the whole job if a process exits without "finalize".
        atexit.register(_leave, _server)
    elif _server.pid != os.getpid():
        raise ConfigError(
            "This process was forked from a rank that uses PMI, and cannot join in place of that rank.\n"
            "  Call init_process_group in the process that the launcher has started."
        )
    return _server


def _leave(server: _Server) -> None:
    failed = hasattr(sys, "last_value")  # Python has printed an uncaught exception
    if server.pid != os.getpid() or failed or mpi_runs():
        return
    with suppress(ConfigError):  # the job is already being terminated
        server.finalize()
