"""Connects the native engine's ranks of different hosts.

Every rank listens on the addresses that its host publishes, and on no others; the higher rank of two dials the lower.
Both prove that they know the job's secret, in the store's way (`_store.wire`), before anything else is said. A
stranger can neither hold up those who belong here nor make a rank keep much: at most 64 at a time, for 5 s, with a
quarter of a kilobyte each.

What is sent afterwards is not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks._errors import ConfigError, JoinError, SecretError, rank_list
from allranks._network import nearest_first
from allranks._store import reason
from allranks._store.wire import (
    GREETING_LIMIT,
    GREETING_S,
    KNOCK,
    NONCE,
    SHARE_SECRET,
    VERSION,
    FrameDecoder,
    Greeting,
    WireError,
    answer_greeting,
    pack_frame,
)

if TYPE_CHECKING:
    from allranks._rendezvous import Member

__all__ = ["KINDS", "TcpDoor", "channel_key"]

KINDS = 3
"""Connections between two ranks: for collectives, messages, signs of life (core/channel/net.h)."""

_HELLO = struct.Struct("!BIIB")  # version, from, to, kind
_VERSION = 1  # of what the core sends (core/channel/net.cc, core/wide.cc)
_TAKEN = b"!"
_STRANGERS = 64
_CONNECT_S = 3.0
_PAUSE_S = 0.05
_PORTS_TRIED = 50


def channel_key(secret: bytes, token: bytes) -> bytes:
    """What the ranks of one group prove to each other to know."""
    return hmac.digest(secret, b"allranks-channel|" + token, "sha256")


class TcpDoor:
    """Where the ranks of other hosts find this one.

    Args:
        addresses: where to listen.

    Attributes:
        port: the same on all of them.

    Raises:
        ConfigError: there is no address, or none can be listened on.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ConfigError(
                f"host {socket.gethostname()} has no network address that other hosts could reach (loopback and bridges"
                " of containers do not count). Name an interface: ALLRANKS_IFACE=eth0"
            )
        self._listeners: list[socket.socket] = []
        self._refusals: dict[str, str] = {}
        for attempt in range(_PORTS_TRIED):
            try:
                self._listen(addresses)
                break
            except OSError as error:
                self.close()
                if attempt == _PORTS_TRIED - 1:
                    raise ConfigError(f"Cannot listen on {', '.join(addresses)}: {reason(error)}.") from None

    def _listen(self, addresses: Sequence[str]) -> None:
        self.port = 0
        gone: OSError | None = None
        for address in addresses:
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, self.port))
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                gone = error  # an interface that is coming up or going down
                continue
            self._listeners.append(listener)
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
        if gone is not None and not self._listeners:
            raise gone

    def __enter__(self) -> TcpDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def meet(
        self,
        rank: int,
        members: Sequence[Member],
        targets: Sequence[tuple[tuple[str, ...], int] | None],
        key: bytes,
        timeout_s: float,
    ) -> list[list[int]]:
        """Connects with other ranks.

        Args:
            rank: this process in the group.
            members: who is in it.
            targets: addresses and port by rank; None of those that are not to be connected.
            key: what all of them know, see ``channel_key``.
            timeout_s: for all of it.

        Returns:
            For each kind the descriptors by rank, -1 where there is no connection.

        Raises:
            JoinError: a rank could not be reached in time.
            SecretError: one has another secret.
        """
        deadline = time.monotonic() + timeout_s
        met: dict[tuple[int, int], socket.socket] = {}
        try:
            for peer in range(rank):
                if targets[peer] is not None:
                    self._dial(rank, peer, members, targets[peer], key, deadline, met)
            awaited = {(p, kind) for p in range(rank + 1, len(targets)) if targets[p] for kind in range(KINDS)}
            if awaited:
                _Reception(rank, key, self._listeners, self._refusals).take(awaited, met, deadline)
            missing = sorted({peer for peer, _ in awaited - met.keys()})
            if missing:
                refused = "".join(f"\n  {line}" for line in self._refusals.values())
                raise JoinError(
                    f"rank {rank} (host {members[rank].host}): {rank_list(missing)} "
                    f"({', '.join(members[p].host for p in missing[:4])}) did not connect in {timeout_s:.1f} s. It"
                    f" listened on port {self.port} of {', '.join(members[rank].addresses)}.{refused}\n"
                    "  Can they reach one of these addresses? A firewall between the hosts must let ranks connect;"
                    " ALLRANKS_IFACE names the interface to use."
                )
        except BaseException:
            for connection in met.values():
                connection.close()
            raise
        found = {where: connection.detach() for where, connection in met.items()}
        return [[found.get((peer, kind), -1) for peer in range(len(targets))] for kind in range(KINDS)]

    def _dial(
        self,
        rank: int,
        peer: int,
        members: Sequence[Member],
        target: tuple[tuple[str, ...], int] | None,
        key: bytes,
        deadline: float,
        met: dict[tuple[int, int], socket.socket],
    ) -> None:
        assert target is not None
        addresses, port = target
        began = time.monotonic()
        trouble = "it publishes no address"
        while True:
            for address in nearest_first(addresses):
                try:
                    for kind in range(KINDS):
                        if (peer, kind) not in met:
                            met[peer, kind] = _connect(address, port, key, (rank, peer, kind), deadline)
                    return
                except SecretError as error:
                    raise SecretError(f"rank {rank}: rank {peer} ({members[peer].host}, {address}): {error}") from None
                except (OSError, WireError, ConfigError) as error:
                    trouble = f"{address}: {reason(error)}"
            if time.monotonic() >= deadline:
                raise JoinError(
                    f"rank {rank} (host {members[rank].host}): no connection with rank {peer} (host"
                    f" {members[peer].host}) for {time.monotonic() - began:.1f} s; tried port {port} of"
                    f" {', '.join(addresses) or 'no address'} (last: {trouble}).\n"
                    "  Can this host reach one of these addresses? A firewall between the hosts must let ranks connect;"
                    " ALLRANKS_IFACE names the interface to use."
                )
            time.sleep(_PAUSE_S)


def _connect(address: str, port: int, key: bytes, hello: tuple[int, int, int], deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        now = time.monotonic()
        connection.settimeout(max(0.01, min(deadline - now, _CONNECT_S)))
        connection.connect((address, port))
        if connection.getsockname() == connection.getpeername():  # TCP's simultaneous open, with itself
            raise ConnectionRefusedError("nobody listens there")
        # It may have to dial others before it answers.
        connection.settimeout(max(0.01, min(deadline - now, GREETING_S)))
        nonce = os.urandom(NONCE)
        connection.sendall(pack_frame(VERSION + nonce + KNOCK))
        decoder = FrameDecoder(GREETING_LIMIT)
        while (frame := decoder.next()) is None:
            decoder.feed(_some(connection))
        proof, right = answer_greeting(key, nonce, frame)
        connection.sendall(pack_frame(proof) + (pack_frame(_HELLO.pack(_VERSION, *hello)) if right else b""))
        if not right:
            raise SecretError(f"its secret differs from ours; {SHARE_SECRET}")
        if _some(connection, len(_TAKEN)) != _TAKEN:  # and no more: the core's first words may be behind it
            raise WireError("it does not expect this rank")
    except BaseException:
        connection.close()
        raise
    return connection


def _some(connection: socket.socket, most: int = GREETING_LIMIT) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionResetError("it closed the connection")
    return data


class _Caller:
    """A connection that has not said yet, or not proved, whose it is."""

    def __init__(self, connection: socket.socket, name: str, key: bytes) -> None:
        self.connection = connection
        self.name = name
        self.since = time.monotonic()
        self.greeting: Greeting | None = Greeting(key, os.urandom(NONCE))
        self.decoder = FrameDecoder(GREETING_LIMIT)


class _Reception:
    """Takes the connections that others open to this rank."""

    def __init__(self, rank: int, key: bytes, listeners: list[socket.socket], refusals: dict[str, str]) -> None:
        self._rank = rank
        self._key = key
        self._listeners = listeners
        self._refusals = refusals
        self._callers: dict[_Caller, None] = {}

    def take(self, awaited: set[tuple[int, int]], met: dict[tuple[int, int], socket.socket], deadline: float) -> None:
        """Until all that are awaited, by rank and kind, have been met, or the deadline."""
        with selectors.DefaultSelector() as self._selector:
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
            try:
                while awaited - met.keys() and (left_s := deadline - time.monotonic()) > 0:
                    for key, _ in self._selector.select(min(left_s, 0.5)):
                        if key.data is None:
                            self._accept(key.fileobj)  # type: ignore[arg-type]
                        elif key.data in self._callers:
                            self._hear(key.data, awaited, met)
                    for caller in [c for c in self._callers if time.monotonic() - c.since > GREETING_S]:
                        self._drop(caller)
            finally:
                for caller in list(self._callers):
                    self._drop(caller)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection, where = listener.accept()
            connection.setblocking(False)
            if len(self._callers) >= _STRANGERS:
                self._drop(next(iter(self._callers)))
            caller = _Caller(connection, str(where[0]), self._key)
            self._callers[caller] = None
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller, awaited: set[tuple[int, int]], met: dict[tuple[int, int], socket.socket]) -> None:
        try:
            caller.decoder.feed(_some(caller.connection))
            while (frame := caller.decoder.next()) is not None:
                if caller.greeting is not None:
                    answer = caller.greeting.step(frame)
                    if answer is not None:
                        caller.connection.sendall(pack_frame(answer))
                    else:
                        caller.greeting = None
                    continue
                if len(frame) != _HELLO.size:
                    raise WireError("no greeting of a rank")
                version, peer, to, kind = _HELLO.unpack(frame)
                if version != _VERSION:
                    raise ConfigError(f"rank {peer} has another version of allranks: install one on all hosts")
                if to != self._rank or (peer, kind) not in awaited or (peer, kind) in met:
                    raise WireError(f"rank {peer} is not expected")
                caller.connection.sendall(_TAKEN)
                met[peer, kind] = caller.connection
                self._forget(caller)
                return
        except BlockingIOError:
            return
        except ConfigError as error:  # another secret or version
            self._refusals[caller.name] = f"{caller.name} was refused: {error}"
            self._drop(caller)
        except (OSError, WireError):
            self._drop(caller)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller]

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()
