"""The native engine: tensors to addresses, and the core's facts to errors for people.

The core (core/) moves bytes and knows neither Python nor torch. This file connects the ranks
(sockets and segments), keeps tensors alive while the core uses them, handles those whose elements
do not lie in one piece, and words the failures.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from allranks import _core
from allranks._engines.base import Engine
from allranks._errors import (
    AllranksError,
    JoinError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._host import usable_cpus
from allranks._types import ReduceOp, Stats
from allranks._work import Work, seconds_of

if TYPE_CHECKING:
    from allranks._rendezvous import Meeting, Member

__all__ = ["NativeEngine"]

_CODES = {getattr(torch, name): code for name, code in _core.DTYPES.items() if hasattr(torch, name)}

# How long a waiting rank spins before it yields its CPU, and then sleeps (core/channel/shm.cc). With more ranks
# than CPUs it does not spin at all.
_SPIN_US = 20.0


class NativeWork(Work):
    """An asynchronous call on the native engine."""

    def __init__(
        self, engine: NativeEngine, verb: str, request: _core.Request, finish: Callable[[], None] | None
    ) -> None:
        self._engine = engine
        self._verb = verb
        self._request = request
        self._finish = finish  # copies a result back into a non-contiguous tensor
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        timeout_s = seconds_of(timeout) if timeout else -1.0
        try:
            self._engine.comm.wait(self._request, timeout_s)
        except _core.Failure as failure:
            error = self._engine.explain(failure, self._verb)
            if self._request.done():
                self._error = error
            raise error from None
        self._copy_back()
        return True

    def is_completed(self) -> bool:
        if not self._request.done():
            return False
        if self._error is None:
            with contextlib.suppress(AllranksError):  # wait and exception() report it
                self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def done(self) -> bool:
        """Whether the core no longer uses the tensor."""
        return self._request.done()

    def _copy_back(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class NativeEngine(Engine):
    """Collectives over shared memory, between ranks of one host."""

    name = "native"

    def __init__(self, meeting: Meeting, group_name: str, timeout_s: float) -> None:
        self._members = meeting.members
        self._rank = meeting.rank
        self._size = meeting.world_size
        self._group_name = group_name
        # Works whose tensor the core may still use, although the caller may have dropped both.
        self._pending: deque[tuple[NativeWork, torch.Tensor]] = deque()
        spare = usable_cpus() - self._size
        sizes = _core.Sizes()
        segments, liveness = _connect(meeting, sizes, timeout_s)
        self.comm = _core.Comm(
            self._rank,
            sizes,
            segments,
            liveness,
            timeout_s,
            _SPIN_US if spare >= 0 else 0.0,
            _SPIN_US if spare >= self._size else 0.0,
        )

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        code = self._check(tensor, "all_reduce")
        if not _core.reduces(code, op):
            raise UsageError(f"all_reduce: {op.name} of {tensor.dtype} tensors is not defined")
        work, finish = (tensor, None) if _plain(tensor) else self._packed(tensor, "all_reduce")
        try:
            if not async_op:
                self.comm.all_reduce(work.data_ptr(), work.numel(), code, op)
                if finish is not None:
                    finish()
                return None
            return self._started(
                "all_reduce", self.comm.start_all_reduce(work.data_ptr(), work.numel(), code, op), work, finish
            )
        except _core.Failure as failure:
            raise self.explain(failure, "all_reduce") from None

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work | None:
        code = self._check(tensor, "broadcast")
        work, finish = (tensor, None) if _plain(tensor) else self._packed(tensor, "broadcast")
        if root == self._rank:
            finish = None
        try:
            if not async_op:
                self.comm.broadcast(work.data_ptr(), work.numel(), code, root)
                if finish is not None:
                    finish()
                return None
            return self._started(
                "broadcast", self.comm.start_broadcast(work.data_ptr(), work.numel(), code, root), work, finish
            )
        except _core.Failure as failure:
            raise self.explain(failure, "broadcast") from None

    def barrier(self, async_op: bool) -> Work | None:
        try:
            if not async_op:
                self.comm.barrier()
                return None
            return self._started("barrier", self.comm.start_barrier(), torch.empty(0), None)
        except _core.Failure as failure:
            raise self.explain(failure, "barrier") from None

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        code = self._check(tensor, "send")
        work = tensor if _plain(tensor) else _elements(tensor)
        try:
            self.comm.send(work.data_ptr(), work.numel(), code, to, tag)
        except _core.Failure as failure:
            raise self.explain(failure, "send") from None

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> int:
        code = self._check(tensor, "recv")
        if self._size == 1:
            raise UsageError("recv: this rank is alone in its group")
        work, finish = (tensor, None) if _plain(tensor) else self._packed(tensor, "recv")
        try:
            sender: int = self.comm.recv(work.data_ptr(), work.numel(), code, source, tag)
        except _core.Failure as failure:
            raise self.explain(failure, "recv") from None
        if finish is not None:
            finish()
        return sender

    def stats(self) -> Stats:
        return Stats(*self.comm.stats())

    def close(self) -> None:
        self.comm.close()
        self._pending.clear()

    def abandon(self) -> None:
        self.comm.abandon()

    # --- tensors ---

    def _check(self, tensor: torch.Tensor, verb: str) -> int:
        """The core's code of the dtype, of a tensor whose elements the core can reach."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{verb}: expected a torch.Tensor, not {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise UsageError(
                f"{verb} on group '{self._group_name}' (rank {self._rank}): the tensor is on {tensor.device}, "
                "but the native engine moves CPU tensors. Call .cpu() first"
            )
        code = _CODES.get(tensor.dtype)
        if code is None or tensor.layout is not torch.strided:
            raise UsageError(f"{verb}: cannot take a tensor of {tensor.dtype}, {tensor.layout}")
        return code

    def _packed(self, tensor: torch.Tensor, verb: str) -> tuple[torch.Tensor, Callable[[], None]]:
        """A contiguous copy to work on, and what brings the result back."""
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"{verb}: the tensor is expanded (shape {tuple(tensor.shape)}, strides {tensor.stride()}): several of "
                "its elements share memory, so that no result can be written to it. Call .contiguous() first"
            )
        work = _elements(tensor)

        def finish() -> None:
            with torch.no_grad():
                tensor.copy_(work)

        return work, finish

    def _started(
        self, verb: str, request: _core.Request, tensor: torch.Tensor, finish: Callable[[], None] | None
    ) -> NativeWork:
        while self._pending and self._pending[0][0].done():
            self._pending.popleft()
        work = NativeWork(self, verb, request, finish)
        self._pending.append((work, tensor))
        return work

    # --- failures ---

    def explain(self, failure: _core.Failure, verb: str) -> AllranksError:
        """The error for people that the core's facts amount to.

        ``verb`` is what this rank called; the failure may have been noticed by another rank, in another call.
        """
        kind, peer, reporter, call, theirs, seconds, calls, waiting_for, text = failure.args
        if kind == "system":
            return AllranksError(text)
        number = ""
        noticed = ""
        if reporter == self._rank:
            number = f" #{call}" if call else ""
        elif reporter >= 0:
            noticed = f"\n  noticed by {self._who(reporter)} in {theirs[0]}{f' #{call}' if call else ''}"
        here = f"{verb}{number} on group '{self._group_name}' (rank {self._rank} of {self._size})"
        if kind == "mismatch":
            return MismatchError(self._explain_mismatch(theirs[0], call, peer, calls))
        if kind == "timeout":
            if peer < 0:
                return TimeoutError(
                    f"{here}: not complete after {seconds:.1f} s. It goes on; wait() may be called again"
                )
            missing = waiting_for or [peer]
            lines = [f"{here}: no data from {', '.join(map(self._who, missing))} for {seconds:.1f} s."]
            lines += [f"  rank {r} {self._last_call(r)}" for r in missing[:4]]
            lines.append("  Longer: init_process_group(timeout=...)")
            return TimeoutError("\n".join(lines) + noticed)
        if kind == "closed":
            return UsageError(f"{here}: the group was destroyed while the call was pending")
        if kind == "interrupted":
            return PeerLostError(f"{here}: {self._who(peer)} was interrupted (Ctrl-C).{noticed}", peer)
        if kind == "left":
            return PeerLostError(
                f"{here}: {self._who(peer)} has left the group: it called destroy_process_group or its process ended."
                f"\n  rank {peer} {self._last_call(peer)}{noticed}",
                peer,
            )
        return PeerLostError(
            f"{here}: {self._who(peer)} died.\n  rank {peer} {self._last_call(peer)}{noticed}"
            f"\n  Look at its output and exit code; a SIGKILL that nobody sent is often the kernel, out of memory.",
            peer,
        )

    def _who(self, rank: int) -> str:
        member: Member = self._members[rank]
        return f"rank {rank} ({member.host}, pid {member.pid})"

    def _last_call(self, rank: int) -> str:
        number, (verb, *_) = self.comm.last_calls()[rank]
        if number == 0:
            return "had not called anything after init_process_group."
        return f"last called {verb} #{number}."

    def _explain_mismatch(self, verb: str, call: int, peer: int, calls: list[_core.Call]) -> str:
        if verb == "recv":
            sent, wanted = calls
            return (
                f"recv on group '{self._group_name}' (rank {self._rank}): {self._who(peer)} sent {_amount(sent)}, "
                f"but the tensor to receive into holds {_amount(wanted)}. The message was dropped."
            )
        ranks_of: dict[_core.Call, list[int]] = {}
        for rank, fingerprint in enumerate(calls):
            ranks_of.setdefault(fingerprint, []).append(rank)
        said = [f"{rank_list(ranks)} called {_call(fingerprint)}" for fingerprint, ranks in ranks_of.items()]
        return f"call #{call} on group '{self._group_name}': {', '.join(said)}. No tensor was changed."


def _amount(fingerprint: _core.Call) -> str:
    return f"{fingerprint[4]} x {fingerprint[1]}"


def _call(fingerprint: _core.Call) -> str:
    verb, _, op, root, _ = fingerprint
    if verb == "barrier":
        return verb
    return f"{verb}({_amount(fingerprint)}, {op if verb == 'all_reduce' else f'src={root}'})"


def _plain(tensor: torch.Tensor) -> bool:
    # A lazily conjugated or negated tensor has a flag, not other bytes.
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


# --- connecting the ranks of a host ---

_HELLO = struct.Struct("!16sI")


def _connect(meeting: Meeting, sizes: _core.Sizes, timeout_s: float) -> tuple[list[int], list[int]]:
    """Exchanges segments with every other rank, over unix sockets that stay open as liveness sockets.

    Returns:
        The segments' descriptors and the sockets' (-1 for this rank), by rank.
    """
    rank, size, members = meeting.rank, meeting.world_size, meeting.members
    elsewhere = [m for m in members if m.boot_id != members[rank].boot_id]
    if elsewhere:
        there = ", ".join(f"rank {m.rank} on {m.host}" for m in elsewhere)
        raise AllranksError(
            f"rank {rank} is on {members[rank].host}, {there}: this version of allranks connects ranks of one host only"
        )
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        segment = _core.create_segment(rank, size, sizes)
        undo.callback(os.close, segment)
        segments = [-1] * size
        segments[rank] = segment
        sockets: dict[int, socket.socket] = {}

        @undo.callback
        def close_peers() -> None:
            for connection in sockets.values():
                connection.close()
            for peer in set(range(size)) - {rank}:
                if segments[peer] >= 0:
                    os.close(segments[peer])

        if size > 1:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
                _meet_peers(meeting, listener, sockets, segments, deadline)
        undo.pop_all()
    return segments, [sockets[r].detach() if r in sockets else -1 for r in range(size)]


def _meet_peers(
    meeting: Meeting,
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    segments: list[int],
    deadline: float,
) -> None:
    rank, size, store = meeting.rank, meeting.world_size, meeting.store

    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    # An abstract address leaves no file behind. Its name is no secret: the token is.
    address = f"\0allranks-{secrets.token_hex(8)}"
    listener.bind(address)
    listener.listen(size)
    if rank == 0:
        store.set("native/token", secrets.token_bytes(16))
    store.set(f"native/address/{rank}", address.encode())
    token = store.get("native/token", left())
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sockets[peer] = connection
            connection.settimeout(left())
            connection.connect(store.get(f"native/address/{peer}", left()))
            socket.send_fds(connection, [_HELLO.pack(token, rank)], [segments[rank]])
        while len(sockets) < size - 1:
            listener.settimeout(left())
            connection = listener.accept()[0]
            connection.settimeout(min(5.0, left()))
            try:
                peer, segment = _hear(connection, token)
            except OSError:
                peer = -1
            if not rank < peer < size or peer in sockets:
                connection.close()  # a stranger
                continue
            sockets[peer], segments[peer] = connection, segment
            socket.send_fds(connection, [_HELLO.pack(token, rank)], [segments[rank]])
        for peer in range(rank):
            sockets[peer].settimeout(left())
            heard, segments[peer] = _hear(sockets[peer], token)
            if heard != peer:
                raise JoinError(f"rank {rank}: what answers at the address of rank {peer} is not rank {peer}")
        # Nobody goes on before everybody is connected: the store may then go away.
        for connection in sockets.values():
            connection.sendall(b"!")
        for connection in sockets.values():
            connection.settimeout(left())
            if connection.recv(1) != b"!":
                raise JoinError(f"rank {rank}: another rank broke off while the ranks were connecting")
    except OSError as error:
        missing = [r for r in range(size) if r != rank and segments[r] < 0]
        why = "in time" if isinstance(error, builtins.TimeoutError) else f"({error.strerror})"
        raise JoinError(
            f"rank {rank}: no connection with {rank_list(missing or list(sockets))} {why}.\n"
            "  Did a rank end while the ranks were connecting? Look at the end of its output"
        ) from error


def _hear(connection: socket.socket, token: bytes) -> tuple[int, int]:
    """The rank and the segment of a peer that knows the token; (-1, -1) for anybody else."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if uid == os.getuid() and len(message) == _HELLO.size and len(fds) == 1:
        said, rank = _HELLO.unpack(message)
        if secrets.compare_digest(said, token):
            return rank, fds[0]
    for fd in fds:
        os.close(fd)
    return -1, -1
