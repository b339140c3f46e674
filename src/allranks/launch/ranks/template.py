"""A process that has imported torch, as the agent had when it forked its ranks, and makes a new rank of itself at once.

An agent that serves ranks has threads and sockets and cannot be forked safely any more, and an interpreter that is
started anew needs seconds to import torch. So the agent of an elastic job forks this process before its ranks. When a
rank is lost, the agent asks it for another one. The template forks twice and the process between ends, so that the
new process is an orphan; as the agent adopts orphans, it becomes its child, and can be waited for as any rank.

The new process waits at a pipe, its gate, until the agent knows its pid. If the agent does not open the gate, or ends,
the process ends.

Source: prctl(2), PR_SET_CHILD_SUBREAPER; unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

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

_LARGEST = 1 << 16
_MOST_FDS = 8
_OPEN = b"!"
PATIENCE_S = 5.0  # a template that does not answer by then is stopped, or hangs in an import


class _Request(msgspec.Struct, frozen=True, array_like=True):
    wanted: RestartRank
    memory: str
    merged: bool  # stdout and stderr are one channel


@dataclass(frozen=True)
class NewRank:
    """What a process that the template has made is to become.

    Attributes:
        wanted: the rank.
        pipes: to the agent; only the rank's ends.
        memory: where it records its calls.
    """

    wanted: RestartRank
    pipes: Pipes
    memory: str


class RankTemplate:
    """The agent's side.

    Attributes:
        pid: the template's process.
        fd: can be read from when a process was made, and when the template is gone.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._gates: list[int] = []  # of processes that were asked for, in order

    @property
    def fd(self) -> int:
        """See the class."""
        return self._sock.fileno()

    @classmethod
    def fork(cls, prepare: Callable[[], Iterator[object]]) -> RankTemplate | NewRank:
        """Forks the template. Returns in each process that it makes, too.

        Args:
            prepare: called in the template, once it is a process of its own. It yields where a process may be made
                before the rest is done.

        Raises:
            OSError: there is no process or socket to be had.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            ours.settimeout(PATIENCE_S)
            return cls(pid, ours)
        try:
            ours.close()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # what is sent to all is not for it
            die_with(parent)
            new = _serve(theirs, prepare())
        except BaseException:  # noqa: BLE001 - it must not go up into the agent's code; the agent sees the end
            traceback.print_exc()
            os._exit(1)
        return new

    def ask(self, wanted: RestartRank, pipes: Pipes, memory: str) -> bool:
        """Asks for a process, which ``take`` returns. False if the template is gone."""
        gate, opener = os.pipe()
        merged = pipes.out == pipes.err
        fds = [gate, pipes.status, pipes.stacks, pipes.out, *([] if merged else [pipes.err])]
        adopt_orphans(True)
        try:
            socket.send_fds(self._sock, [msgspec.msgpack.encode(_Request(wanted, memory, merged))], fds)
        except OSError:
            os.close(opener)
            return False
        finally:
            os.close(gate)
        self._gates.append(opener)
        return True

    def take(self) -> int | None:
        """The pid of the next process that was asked for: a child that waits for ``open_gate``. Waits for it.

        Returns:
            0 if no process could be had; None if the template is gone.
        """
        try:
            answer = self._sock.recv(_LARGEST)
        except OSError:  # it is late, or gone
            return None
        return int(answer) if answer else None

    def open_gate(self, there: bool) -> None:
        """Opens the gate of the process that ``take`` returned; not ``there``: there is none."""
        gate = self._gates.pop(0)
        if there:
            os.write(gate, _OPEN)
        os.close(gate)
        if not self._gates:
            adopt_orphans(False)

    def close(self) -> None:
        """Ends the template, and processes that wait. To be called once."""
        self._sock.close()
        for gate in self._gates:
            os.close(gate)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        adopt_orphans(False)


def _serve(sock: socket.socket, work: Iterator[object]) -> NewRank:
    """Makes processes, as long as the agent asks for some, and works meanwhile. Returns in those."""
    while True:
        for _ in work:
            if select.select([sock], [], [], 0)[0]:
                break
        try:
            data, fds, _, _ = socket.recv_fds(sock, _LARGEST, _MOST_FDS)
        except OSError:  # the agent notices that this process is gone, and does without
            os._exit(1)
        if not data:
            os._exit(0)
        for fd in fds:
            os.set_inheritable(fd, False)
        if _fork_orphan(sock):
            sock.close()
            gate, *streams = fds
            if os.read(gate, 1) != _OPEN:
                os._exit(0)
            os.close(gate)
            return _new_rank(msgspec.msgpack.decode(data, type=_Request), streams)
        for fd in fds:
            os.close(fd)


def _new_rank(request: _Request, streams: list[int]) -> NewRank:
    status, stacks, out, *rest = streams
    err = out if request.merged else rest[0]
    return NewRank(request.wanted, Pipes(out, err, status, stacks, {}, -1, -1, ()), request.memory)


def _fork_orphan(sock: socket.socket) -> bool:
    """Makes a process whose parent has ended, and sends its pid. Returns True in that process."""
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
        os.waitpid(between, 0)
        os.close(write_fd)
        write_fd = -1
        pid = int(os.read(read_fd, 32) or 0)
    except OSError:  # no process is to be had: the agent is told by 0
        pid = 0
    if write_fd >= 0:
        os.close(write_fd)
    os.close(read_fd)
    sock.send(b"%d" % pid)
    return False
