"""A process that has imported torch, like the agent when it forked its ranks, and forks new ranks immediately.

An agent that serves ranks has threads and sockets and cannot be forked safely any more. A fresh interpreter needs
seconds to import torch. Therefore the agent of an elastic job forks this process before its ranks. When a rank is lost,
the agent requests a new one from it. The template forks twice and the intermediate process exits, so the new process is
an orphan. The agent adopts orphans, so the new process becomes its child, and the agent can wait for it as for any
rank.

The new process waits at a pipe, its gate, until the agent has its pid. If the agent does not open the gate, or exits,
the process exits.

Source: prctl(2), PR_SET_CHILD_SUBREAPER; unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from allranks.launch.ranks.pipes import Pipes
from allranks.launch.ranks.rank import adopt_orphans, die_with
from allranks.launch.spec.events import RestartRank

__all__ = ["PATIENCE_S", "NewRank", "RankTemplate"]

_LARGEST = 1 << 16  # bytes; a longer message would be truncated
_MOST_FDS = 8  # a request has at most 5: gate, status, stacks, stdout, stderr
_OPEN = b"!"
PATIENCE_S = 5.0  # seconds; a template that does not reply by then is stopped, or hangs in an import


class _RankRequest(msgspec.Struct, frozen=True, array_like=True):
    wanted: RestartRank
    memory: str
    merged: bool  # stdout and stderr are one channel


@dataclass(frozen=True)
class NewRank:
    """The rank that a process of the template becomes.

    Attributes:
        wanted: the rank.
        pipes: the pipes to the agent; only the rank's ends.
        memory: path of the memory for its calls.
    """

    wanted: RestartRank
    pipes: Pipes
    memory: str


class RankTemplate:
    """The agent's side of the template.

    Attributes:
        pid: the template's process.
        fd: readable when a process was forked, and when the template is lost.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._gates: list[int] = []  # of requested processes, in order

    @property
    def fd(self) -> int:
        """See the class."""
        return self._sock.fileno()

    @classmethod
    def fork(cls, prepare: Callable[[], Iterator[object]]) -> RankTemplate | NewRank:
        """Fork the template. Return also in each process that the template forks.

        Args:
            prepare: called in the template, after the fork. It yields at points where a process may be forked before
                the rest is done.

        Raises:
            OSError: a process or socket could not be created.
        """
        # SOCK_SEQPACKET keeps the boundaries of messages; an empty message is the end of the other side.
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            child_end.close()
            # ``take`` must not wait forever for a template that is stopped.
            own_end.settimeout(PATIENCE_S)
            return cls(pid, own_end)
        try:
            own_end.close()
            # signals that are sent to all processes must not stop the template
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            die_with(parent)
            new = _serve(child_end, prepare())
        except BaseException:  # noqa: BLE001 - it must not propagate into the agent's code; the agent detects the exit
            traceback.print_exc()
            os._exit(1)
        return new

    def request_process(self, wanted: RestartRank, pipes: Pipes, memory: str) -> bool:
        """Request a process, which ``take`` returns. Return False if the template is lost."""
        gate, opener = os.pipe()
        merged = pipes.out == pipes.err
        fds = [gate, pipes.status, pipes.stacks, pipes.out, *([] if merged else [pipes.err])]
        # Before the request, because the new process is an orphan before the reply arrives.
        adopt_orphans(True)
        try:
            socket.send_fds(self._sock, [msgspec.msgpack.encode(_RankRequest(wanted, memory, merged))], fds)
        except OSError:
            os.close(opener)
            return False
        finally:
            os.close(gate)
        self._gates.append(opener)
        return True

    def take(self) -> int | None:
        """Wait for the next requested process, and return its pid: a child that waits for ``open_gate``.

        Returns:
            0 if no process could be created; None if the template is lost.
        """
        try:
            answer = self._sock.recv(_LARGEST)
        except OSError:  # the template is late or lost
            return None
        return int(answer) if answer else None

    def open_gate(self, there: bool) -> None:
        """Open the gate of the process that ``take`` returned. ``there``: False if there is no such process."""
        gate = self._gates.pop(0)
        if there:
            # The new process may have been killed; its exit is then reported like that of any rank.
            with contextlib.suppress(BrokenPipeError):
                os.write(gate, _OPEN)
        os.close(gate)
        # A subreaper also adopts daemons of ranks, so the agent is one only while a request is pending.
        if not self._gates:
            adopt_orphans(False)

    def close(self) -> None:
        """Kill the template, and let waiting processes exit. Call it once."""
        self._sock.close()
        for gate in self._gates:
            os.close(gate)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        adopt_orphans(False)


def _serve(sock: socket.socket, work: Iterator[object]) -> NewRank:
    """Fork processes on request of the agent, and do ``work`` between requests. Return in the forked processes."""
    while True:
        # A request has priority: the new rank then imports the remaining modules itself.
        for _ in work:
            if select.select([sock], [], [], 0)[0]:
                break
        try:
            data, fds, _, _ = socket.recv_fds(sock, _LARGEST, _MOST_FDS)
        except OSError:  # the agent detects the exit, and continues without the template
            os._exit(1)
        if not data:  # the agent has closed its end
            os._exit(0)
        for fd in fds:
            # ``recv_fds`` returns inheritable descriptors, which a program of the rank must not pass on.
            os.set_inheritable(fd, False)
        if _fork_orphan(sock):
            # A copy in the rank would hide the exit of the template from the agent.
            sock.close()
            gate, *streams = fds
            if os.read(gate, 1) != _OPEN:
                os._exit(0)
            os.close(gate)
            return _new_rank(msgspec.msgpack.decode(data, type=_RankRequest), streams)
        for fd in fds:
            os.close(fd)


def _new_rank(request: _RankRequest, streams: list[int]) -> NewRank:
    status, stacks, out, *rest = streams
    err = out if request.merged else rest[0]
    return NewRank(request.wanted, Pipes(out, err, status, stacks, {}, -1, -1, ()), request.memory)


def _fork_orphan(sock: socket.socket) -> bool:
    """Fork a process whose parent has exited, and send its pid. Return True in that process."""
    read_fd, write_fd = os.pipe()
    pid = 0
    try:
        between = os.fork()
        if between == 0:
            os.close(read_fd)
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid:
                os.write(write_fd, b"%d" % pid)
                os._exit(0)
            os.close(write_fd)
            return True
        # After this, the agent is the parent of the new process, as ``die_with`` requires.
        os.waitpid(between, 0)
        # Before the read, which ends by the end of file if the second fork failed.
        os.close(write_fd)
        write_fd = -1
        pid = int(os.read(read_fd, 32) or 0)
    except OSError:  # no process could be created: the agent receives 0
        pid = 0
    if write_fd >= 0:
        os.close(write_fd)
    os.close(read_fd)
    sock.send(b"%d" % pid)
    return False
