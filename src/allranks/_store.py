"""The key-value store where ranks meet: small values, blocking reads, nothing polled.

A store is for meeting (addresses, counters, verdicts), not for bulk data. Why not torch's TCPStore: it has no
authentication, opens a TCP port even on one host, hangs when something else answers on its port, and needs
torch, which the launcher must not import. Who listens where, and what the keys mean, is ``_rendezvous``'s
business; what a secret may be handed over by is the launcher's.

The layers, from pure to worldly, so that each can be tested alone:

- ``FrameDecoder``, ``Greeting``: bytes to frames, and the server's half of the handshake. No socket, no clock.
- ``KeyTable``: the values, and who waits for which. Time comes in as an argument.
- ``Store`` and its kinds: ``MemoryStore``, ``PrefixStore``, ``ForeignStore``, ``StoreClient``.
- ``StoreServer``: one thread, one selector, any number of clients.

On the wire every frame is a 4-byte big-endian length and a payload. The first three are the handshake: version
and nonce; version, nonce and the server's proof; the client's proof. A proof is an HMAC-SHA256 over the
version, the prover's role and both nonces, so neither a replayed nor a reflected one is worth anything. After it
come typed msgspec structs. Nothing is encrypted. On a unix socket the kernel vouches for the peer's user, and
the secret may be empty.
"""

from __future__ import annotations

import abc
import builtins
import errno
import heapq
import hmac
import itertools
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from allranks._env import split_host_port
from allranks._errors import AllranksError, ConfigError, JoinError, TimeoutError, UsageError

__all__ = [
    "FRAME_LIMIT",
    "ForeignStore",
    "FrameDecoder",
    "Greeting",
    "KeyTable",
    "MemoryStore",
    "PrefixStore",
    "SecretError",
    "Store",
    "StoreClient",
    "StoreLostError",
    "StoreServer",
    "WireError",
    "load_secret",
    "pack_frame",
    "reason",
]

FRAME_LIMIT = 16 << 20
"""Largest frame, and so about the largest value, between peers that have proved themselves."""

_GREETING_LIMIT = 256
_GREETING_S = 5.0
_GREETING_PEERS = 64
_PROTOCOL = b"allranks-store/"
_VERSION = _PROTOCOL + b"1"
_NONCE = 32
_KNOCK = b"\r\n\r\n"  # ends the first frame: a stranger who reads lines (HTTP, SMTP, Redis) answers at once
_LONGEST_S = 1e8  # what select and settimeout take; three years
_GRACE_S = 0.5  # the server ends a wait first; a client that hears nothing gives up this much later

_SHARE_SECRET = (
    "give both sides the same one: set ALLRANKS_SECRET, or ALLRANKS_SECRET_FILE, or copy the file"
    " ~/.config/allranks/secret (mode 0600) from one host to the other"
)
_log = logging.getLogger("allranks.store")


class StoreLostError(AllranksError):
    """The connection to the store broke: its server ended, or this client was closed."""


class SecretError(ConfigError):
    """The two sides do not have the same secret."""


class WireError(Exception):
    """A peer broke the protocol. Internal: its connection is dropped."""


# --- frames and the handshake: pure ---------------------------------------------------------------------------


def pack_frame(payload: bytes) -> bytes:
    """Puts the length in front."""
    return struct.pack(">I", len(payload)) + payload


class FrameDecoder:
    """Turns bytes, cut anywhere, into frames. Keeps no more than it was fed, whatever length a peer announces."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._buffer += data

    def next(self) -> bytes | None:
        """Returns the next whole frame, or None until more is fed.

        Raises:
            WireError: a frame longer than the limit is announced.
        """
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._buffer)
        if length > self.limit:
            raise WireError(f"a frame of {length} bytes is announced, the limit is {self.limit}")
        if len(self._buffer) < 4 + length:
            return None
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, _VERSION + b"|" + role + b"|" + client_nonce + server_nonce, "sha256")


class Greeting:
    """The server's half of the handshake."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._nonce = nonce
        self._expected = b""

    @property
    def begun(self) -> bool:
        """Whether the peer has said something that makes sense."""
        return bool(self._expected)

    def step(self, frame: bytes) -> bytes | None:
        """Takes the peer's next frame; returns the answer, or None when the peer has proved itself.

        Raises:
            WireError: not an allranks client.
            ConfigError: one of another version, or (SecretError) with another secret.
        """
        if self._expected:
            if not hmac.compare_digest(frame, self._expected):
                raise SecretError(f"its secret differs from ours; {_SHARE_SECRET}")
            return None
        version, nonce = frame[: -_NONCE - len(_KNOCK)], frame[-_NONCE - len(_KNOCK) : -len(_KNOCK)]
        if not version.startswith(_PROTOCOL):
            raise WireError("not an allranks client")
        if version != _VERSION:
            raise ConfigError(f"it speaks {version!r}, we speak {_VERSION!r}; install one version on all hosts")
        self._expected = _proof(self._secret, b"client", nonce, self._nonce)
        return _VERSION + self._nonce + _proof(self._secret, b"server", nonce, self._nonce)


def _answer_greeting(secret: bytes, nonce: bytes, frame: bytes) -> tuple[bytes, bool]:
    """The client's half: returns its proof, and whether the server's was right."""
    if not frame.startswith(_PROTOCOL):
        raise WireError("what it says is not allranks")
    version, server_nonce, proof = frame[: -2 * _NONCE], frame[-2 * _NONCE : -_NONCE], frame[-_NONCE:]
    if version != _VERSION:
        raise ConfigError(f"speaks another version ({frame[:24]!r}, we speak {_VERSION!r}): install one on all hosts")
    right = hmac.compare_digest(proof, _proof(secret, b"server", nonce, server_nonce))
    return _proof(secret, b"client", nonce, server_nonce), right


# --- requests and replies -------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Set(_Message, frozen=True):
    key: str
    value: bytes


class Add(_Message, frozen=True):
    key: str
    amount: int


class Peek(_Message, frozen=True):
    keys: list[str]


class Wait(_Message, frozen=True):
    keys: list[str]
    timeout_s: float
    values: bool


class Delete(_Message, frozen=True):
    key: str


class CompareSet(_Message, frozen=True):
    key: str
    expected: bytes
    desired: bytes


class Done(_Message, frozen=True):
    number: int = 0


class Found(_Message, frozen=True):
    values: list[bytes | None]


class Late(_Message, frozen=True):
    missing: list[str]


class Failed(_Message, frozen=True):
    text: str


Request = Set | Add | Peek | Wait | Delete | CompareSet
Reply = Done | Found | Late | Failed
_ReplyT = TypeVar("_ReplyT", Done, Found)

_encode = msgspec.msgpack.Encoder().encode
_decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
_decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode


@dataclass
class _Parked:
    request: Wait
    missing: set[str]


class KeyTable:
    """The values of a store, and the readers that wait for some. Knows neither sockets nor clocks.

    Every method that can end a wait returns the replies that are now due, as (who, reply) pairs.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[Hashable, _Parked] = {}
        self._waiters: dict[str, set[Hashable]] = {}
        self._deadlines: list[tuple[float, int, Hashable, _Parked]] = []
        self._order = itertools.count()

    def handle(self, who: Hashable, request: Request, now: float) -> list[tuple[Hashable, Reply]]:
        """Carries out one request of ``who``, who must not have another one parked."""
        match request:
            case Set(key, value):
                return [(who, Done()), *self._put(key, value)]
            case Add(key, amount):
                try:
                    number = int(self._values.get(key, b"0")) + amount
                except ValueError:
                    return [(who, Failed(f"add({key!r}): its value is not a whole number"))]
                return [(who, Done(number)), *self._put(key, b"%d" % number)]
            case Peek(keys):
                return [(who, Found([self._values.get(key) for key in keys]))]
            case Delete(key):
                return [(who, Done(int(self._values.pop(key, None) is not None)))]
            case CompareSet(key, expected, desired):
                # torch's rule: an absent key counts as expected if b"" is; otherwise the caller gets its own
                # expectation back.
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    return [(who, Found([desired])), *self._put(key, desired)]
                return [(who, Found([expected if current is None else current]))]
            case Wait():
                return self._park(who, request, now)

    def expire(self, now: float) -> list[tuple[Hashable, Reply]]:
        """Ends the waits whose time is over."""
        due: list[tuple[Hashable, Reply]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, who, parked = heapq.heappop(self._deadlines)
            if self._parked.get(who) is parked:
                self.forget(who)
                due.append((who, Late(sorted(parked.missing)[:20])))
        return due

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do, at the earliest."""
        while self._deadlines and self._parked.get(self._deadlines[0][2]) is not self._deadlines[0][3]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def waits(self, who: Hashable) -> bool:
        """Whether ``who`` has a request parked."""
        return who in self._parked

    def forget(self, who: Hashable) -> None:
        """Drops what ``who`` waits for."""
        parked = self._parked.pop(who, None)
        for key in parked.missing if parked else ():
            self._waiters[key].discard(who)
            if not self._waiters[key]:
                del self._waiters[key]

    def _put(self, key: str, value: bytes) -> list[tuple[Hashable, Reply]]:
        self._values[key] = value
        due: list[tuple[Hashable, Reply]] = []
        for who in self._waiters.pop(key, ()):
            parked = self._parked[who]
            parked.missing.discard(key)
            if not parked.missing:
                del self._parked[who]
                due.append((who, self._found(parked.request)))
        return due

    def _park(self, who: Hashable, request: Wait, now: float) -> list[tuple[Hashable, Reply]]:
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return [(who, self._found(request))]
        if request.timeout_s <= 0:
            return [(who, Late(sorted(missing)[:20]))]
        parked = self._parked[who] = _Parked(request, missing)
        for key in missing:
            self._waiters.setdefault(key, set()).add(who)
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._order), who, parked))
        return []

    def _found(self, request: Wait) -> Found:
        return Found([self._values.get(key) for key in request.keys] if request.values else [])


# --- the stores -----------------------------------------------------------------------------------------------


class Store(abc.ABC):
    """Small values under names, seen by all ranks of a job. Thread-safe."""

    @abc.abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets a value, and wakes those who wait for it."""

    @abc.abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns a value; waits until it is set.

        Raises:
            TimeoutError: nobody set it in time.
        """

    @abc.abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which starts at 0, in one step; returns the sum."""

    @abc.abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all keys are set."""

    @abc.abstractmethod
    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Waits until all keys are set.

        Raises:
            TimeoutError: some were not set in time; names them.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Removes a key; says whether it was there."""

    @abc.abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a value if it is ``expected`` (``b""`` also stands for absent); returns the value afterwards.

        As in torch: where the key is absent and ``expected`` is not ``b""``, returns ``expected``.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what this object holds."""

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values that are set now, None for the others."""
        return [self.get(key, 1.0) if self.check([key]) else None for key in keys]

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _AskingStore(Store):
    """A store whose every method is one request and its reply."""

    @abc.abstractmethod
    def _ask(self, request: Request) -> Reply: ...

    @abc.abstractmethod
    def __str__(self) -> str: ...

    def _reply(self, request: Request, kind: type[_ReplyT]) -> _ReplyT:
        match self._ask(request):
            case Late(missing) if isinstance(request, Wait):
                names = ", ".join(map(repr, missing))
                raise TimeoutError(
                    f"{self}: nobody set {names} in {request.timeout_s:.1f} s.\n"
                    "  The rank that sets it may be late or gone: look at its output."
                    "    Longer: init_process_group(timeout=...)"
                )
            case Failed(text):
                raise UsageError(f"{self}: {text}")
            case reply:
                assert isinstance(reply, kind), reply
                return reply

    def set(self, key: str, value: bytes) -> None:
        self._reply(Set(key, value), Done)

    def get(self, key: str, timeout_s: float) -> bytes:
        value = self._reply(Wait([key], min(timeout_s, _LONGEST_S), True), Found).values[0]
        assert value is not None
        return value

    def add(self, key: str, amount: int) -> int:
        return self._reply(Add(key, amount), Done).number

    def check(self, keys: Sequence[str]) -> bool:
        return isinstance(self._ask(Wait(list(keys), 0.0, False)), Found)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self._reply(Wait(list(keys), min(timeout_s, _LONGEST_S), False), Found)

    def delete(self, key: str) -> bool:
        return bool(self._reply(Delete(key), Done).number)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._reply(CompareSet(key, expected, desired), Found).values[0] or b""

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._reply(Peek(list(keys)), Found).values


class MemoryStore(_AskingStore):
    """A store inside this process, for a job of one rank."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._changed = threading.Condition()
        self._replies: dict[Hashable, Reply] = {}

    def __str__(self) -> str:
        return "the store of this process"

    def _ask(self, request: Request) -> Reply:
        who = object()
        with self._changed:
            due = self._table.handle(who, request, time.monotonic())
            try:
                while True:
                    if due:
                        self._replies.update(due)
                        self._changed.notify_all()
                    if who in self._replies:
                        return self._replies[who]
                    deadline = self._table.next_deadline()
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                    due = self._table.expire(time.monotonic())
            finally:
                self._table.forget(who)
                self._replies.pop(who, None)

    def close(self) -> None:
        """Nothing is held."""


class PrefixStore(Store):
    """A view of another store in which every key begins with a prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.store = store

    def set(self, key: str, value: bytes) -> None:
        self.store.set(self.prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self.store.get(self.prefix + key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self.prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check([self.prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self.store.wait([self.prefix + key for key in keys], timeout_s)

    def delete(self, key: str) -> bool:
        return self.store.delete(self.prefix + key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.store.compare_set(self.prefix + key, expected, desired)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.store.peek([self.prefix + key for key in keys])

    def close(self) -> None:
        """A view holds nothing; the store behind it stays open."""


class ForeignStore(Store):
    """A user's store with torch's methods (set, get, add, check, wait) behind our interface."""

    def __init__(self, store: Any) -> None:
        missing = [name for name in ("set", "get", "add", "check", "wait") if not callable(getattr(store, name, None))]
        if missing:
            raise UsageError(
                f"store={store!r} has no method {', '.join(missing)}. Expected one such as torch's TCPStore."
            )
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        began = time.monotonic()
        # In torch a timeout of 0 means for ever.
        limit = timedelta(seconds=min(max(timeout_s, 0.001), _LONGEST_S))
        try:
            self._store.wait(list(keys), limit)
        except (RuntimeError, OSError) as error:  # torch raises DistStoreError, a RuntimeError, for all failures
            if time.monotonic() - began < limit.total_seconds() * 0.9:
                raise
            raise TimeoutError(
                f"store={type(self._store).__name__}: {', '.join(map(repr, keys[:20]))} not set in {timeout_s:.1f} s.\n"
                "  The rank that sets it may be late or gone: look at its output."
            ) from error

    def delete(self, key: str) -> bool:
        return bool(self._method("delete_key")(key))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._method("compare_set")(key, expected, desired))

    def close(self) -> None:
        """The store is the user's; it stays open."""

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name, None)
        if method is None:
            raise UsageError(f"store={type(self._store).__name__} has no method {name}, which this call needs.")
        return method  # type: ignore[no-any-return]


# --- the client -----------------------------------------------------------------------------------------------


class _Line:
    """One connection of a client: a request and its reply at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder(_GREETING_LIMIT)

    def ask(self, payload: bytes, deadline: float) -> bytes:
        self._patience(deadline)
        self.sock.sendall(pack_frame(payload))
        return self._receive(deadline)

    def greet(self, secret: bytes, deadline: float) -> None:
        nonce = os.urandom(_NONCE)
        frame = self.ask(_VERSION + nonce + _KNOCK, deadline)
        proof, right = _answer_greeting(secret, nonce, frame)
        self.sock.sendall(pack_frame(proof))  # also where it is wrong, so that the server can say why, too
        if not right:
            raise SecretError(f"its secret differs from ours; {_SHARE_SECRET}")
        self._decoder.limit = FRAME_LIMIT

    def _receive(self, deadline: float) -> bytes:
        while (frame := self._decoder.next()) is None:
            self._patience(deadline)
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._decoder.feed(data)
        return frame

    def _patience(self, deadline: float) -> None:
        self.sock.settimeout(min(max(deadline - time.monotonic(), 0.001), _LONGEST_S))


class StoreClient(_AskingStore):
    """A store that a ``StoreServer`` holds. Each thread that asks at the same time gets its own connection.

    Attributes:
        address: where the server is.
        deadline: a moment (``time.monotonic``) that no request outlasts, however long its own timeout.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        self.address = address
        self.deadline = math.inf
        self._secret = secret
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._busy: set[_Line] = set()
        self._closed = False

    @classmethod
    def connect(cls, address: str, secret: bytes = b"", timeout_s: float = 300.0, *, retry: bool = True) -> StoreClient:
        """Connects; tries again while nobody listens there yet.

        Args:
            address: ``unix:@name`` or ``tcp:host:port``.
            secret: what the server was given; may be empty for a unix socket.
            timeout_s: how long to try, and the longest time any single request may take.
            retry: whether to try again.

        Raises:
            JoinError: nobody answered in time.
            ConfigError: what answers is no allranks store, has another version or (SecretError) another secret.
        """
        client = cls(address, secret, timeout_s)
        client._idle.append(client._dial(time.monotonic() + timeout_s, retry))
        return client

    def __str__(self) -> str:
        return f"the store at {self.address}"

    def close(self) -> None:
        """Closes all connections; a call in another thread ends with StoreLostError."""
        with self._lock:
            self._closed = True
            for line in self._idle:
                line.sock.close()
            self._idle.clear()
            for line in self._busy:
                with suppress(OSError):  # already broken: its user is about to notice
                    line.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, request: Request) -> Reply:
        payload = _encode(request)
        if len(payload) > FRAME_LIMIT:
            raise UsageError(
                f"{self}: a request of {len(payload)} bytes, the limit is {FRAME_LIMIT}: send data by rank."
            )
        began = time.monotonic()
        patience_s = self._timeout_s
        if isinstance(request, Wait) and request.timeout_s > 0:
            patience_s = request.timeout_s + _GRACE_S
        deadline = min(began + patience_s, self.deadline)
        kept = False
        line = self._take_line(deadline)
        try:
            reply = _decode_reply(line.ask(payload, deadline))
            kept = True
        except builtins.TimeoutError:
            raise TimeoutError(
                f"{self} did not answer for {time.monotonic() - began:.1f} s.\n"
                "  Its process (rank 0, or the launcher) is stopped, overloaded or unreachable: look at its host."
            ) from None
        except (OSError, WireError, msgspec.MsgspecError) as error:
            why = "this client was closed" if self._closed else reason(error)
            raise StoreLostError(
                f"{self}: the connection broke ({why}).\n"
                "  Its process (rank 0, or the launcher) ended: look at the end of its output."
            ) from error
        finally:
            with self._lock:
                self._busy.discard(line)
                if kept and not self._closed:
                    self._idle.append(line)
                else:  # a reply may still be on its way: nobody else may read it
                    line.sock.close()
        return reply

    def _take_line(self, deadline: float) -> _Line:
        with self._lock:
            line = self._idle.pop() if self._idle else None
        if line is None and not self._closed:
            line = self._dial(deadline)
        with self._lock:
            if line is not None and not self._closed:
                self._busy.add(line)
                return line
        if line is not None:
            line.sock.close()
        raise StoreLostError(f"{self}: this client was closed.")

    def _dial(self, deadline: float, retry: bool = True) -> _Line:
        began, pause_s = time.monotonic(), 0.01
        while True:
            try:
                return self._dial_once(deadline)
            except OSError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not retry:
                    raise JoinError(
                        f"{self} did not answer for {time.monotonic() - began:.1f} s (last: {reason(error)}).\n"
                        "  Is its process (rank 0, or the launcher) running, and can this host reach it?"
                        "    Longer: init_process_group(timeout=...)"
                    ) from error
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, 0.2)

    def _dial_once(self, deadline: float) -> _Line:
        trouble: OSError = OSError(errno.EADDRNOTAVAIL, "its name has no address")
        stranger: Exception | None = None
        for family, target in _resolve(self.address):
            line = _Line(socket.socket(family, socket.SOCK_STREAM))
            try:
                now = time.monotonic()
                line.sock.settimeout(min(max(deadline - now, 0.001), 3.0))
                line.sock.connect(target)
                _check_peer(line.sock, self.address)
                line.greet(self._secret, min(deadline, now + _GREETING_S))
                return line
            except OSError as error:
                trouble = error
            except (WireError, ConfigError) as error:
                stranger = error
            except BaseException:
                line.sock.close()
                raise
            line.sock.close()
        if isinstance(stranger, ConfigError):
            raise type(stranger)(f"{self}: {stranger}.")
        if stranger:
            raise ConfigError(
                f"{self}: something answers there, but it is not an allranks store ({stranger}).\n"
                "  Another program holds that port: choose another one (MASTER_PORT), the same on all ranks."
            )
        raise trouble


def reason(error: BaseException) -> str:
    """Says in a few words what the system said."""
    if isinstance(error, builtins.TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or error).lower()


def _resolve(address: str) -> list[tuple[int, Any]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        return [(socket.AF_UNIX, "\0" + rest[1:])]
    host, port = split_host_port(rest, "the store's address")
    if kind != "tcp" or not host or port is None:
        raise ConfigError(f"{address!r} is not the address of a store. Expected unix:@NAME or tcp:HOST:PORT.")
    try:
        # The server binds 127.0.0.1 for this name; ::1 may be somebody else's.
        found = socket.getaddrinfo("127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigError(f"{host!r} is not a host name ({error}). Expected one such as node0.") from None
    return [(family, target) for family, _, _, _, target in found]


def _check_peer(sock: socket.socket, address: str) -> None:
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _credentials(sock)
        if uid != os.geteuid():
            raise ConfigError(f"belongs to user {uid}, this process to user {os.geteuid()}")
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Retrying towards a local port that nobody listens on may meet itself, as TCP's simultaneous open.
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid, gid


# --- the server -----------------------------------------------------------------------------------------------


class _Peer:
    def __init__(self, sock: socket.socket, name: str, greeting: Greeting, since: float) -> None:
        self.sock = sock
        self.name = name
        self.greeting: Greeting | None = greeting
        self.since = since
        self.decoder = FrameDecoder(_GREETING_LIMIT)
        self.out = bytearray()
        self.events = selectors.EVENT_READ


class StoreServer:
    """Holds a store's values and serves them from one thread.

    Made by ``unix`` or ``tcp``, which bind and listen but start nothing, so that a process can fork its ranks
    before it has a thread. A forked child that does not serve calls ``close``, which leaves the parent's alone.

    Attributes:
        address: what clients connect to.
        refusals: one line for each host that came with another secret or version.
    """

    def __init__(self, listener: socket.socket, address: str, secret: bytes) -> None:
        self.address = address
        self.refusals: dict[str, str] = {}
        self._secret = secret
        self._listener = listener
        self._owner = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._stop_at: float | None = None
        self._table = KeyTable()
        self._peers: dict[_Peer, None] = {}
        self._strangers: dict[_Peer, None] = {}  # the peers that have not proved themselves yet

    @classmethod
    def unix(cls, secret: bytes = b"") -> StoreServer:
        """Listens on an abstract unix socket with an unguessable name; only this user's processes get in."""
        name = f"allranks-{os.urandom(16).hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(1024)
        return cls(listener, f"unix:@{name}", secret)

    @classmethod
    def tcp(cls, host: str, port: int, secret: bytes) -> StoreServer:
        """Listens on a TCP port; only holders of the secret get in.

        Args:
            host: a loopback address to listen there only. For any other name or address the server listens on
                all interfaces, as a host's own name often resolves to 127.0.1.1 on the host itself.
            port: the port; 0 for a free one.
            secret: what clients must know.

        Raises:
            ConfigError: the port cannot be had; says who holds it, if that can be seen.
        """
        if not secret:
            raise UsageError("StoreServer.tcp needs a secret: see load_secret.")
        loopback = "127.0.0.1" if host == "localhost" else host if host == "::1" or host.startswith("127.") else ""
        dual = not loopback and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in loopback else socket.AF_INET
        try:
            listener = socket.create_server((loopback, port), family=family, backlog=1024, dualstack_ipv6=dual)
        except OSError as error:
            holder = _port_holder(port) if error.errno == errno.EADDRINUSE else ""
            why = reason(error).partition(" (while")[0]  # create_server adds what is said here anyway
            raise ConfigError(
                f"Cannot listen on port {port} ({loopback or 'all interfaces'}): {why}{holder}.\n"
                "  Choose another port (MASTER_PORT), the same on all ranks, or end the program that holds it."
            ) from None
        port = listener.getsockname()[1]
        shown = loopback or host or socket.gethostname()
        return cls(listener, f"tcp:[{shown}]:{port}" if ":" in shown else f"tcp:{shown}:{port}", secret)

    @property
    def here(self) -> str:
        """The address for clients on this host, which needs no name service."""
        if self._listener.family == socket.AF_UNIX or self.address.startswith(("tcp:127.", "tcp:[::1]")):
            return self.address
        return f"tcp:127.0.0.1:{self.address.rpartition(':')[2]}"

    def start(self) -> StoreServer:
        """Starts the thread that serves."""
        self._thread = threading.Thread(target=self._run, name="allranks-store", daemon=True)
        self._thread.start()
        return self

    def close(self, linger_s: float = 0.0) -> None:
        """Stops listening, waits up to ``linger_s`` for the clients to go, and ends the thread. Idempotent."""
        if self._stop_at is not None:
            return
        self._stop_at = time.monotonic() + linger_s
        if self._owner == os.getpid():
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
                self._thread.join()
            else:
                self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        os.close(self._wake)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            try:
                while self._stop_at is None:
                    self._turn()
                # Also wakes whoever shares this socket after a fork, and frees the port although they hold it.
                self._selector.unregister(self._listener)
                self._selector.unregister(self._wake)
                self._listener.shutdown(socket.SHUT_RDWR)
                while time.monotonic() < self._stop_at and any(
                    peer.greeting is None or peer.greeting.begun for peer in self._peers
                ):
                    self._turn()
            finally:
                for peer in list(self._peers):
                    self._drop(peer)
                self._listener.close()

    def _turn(self) -> None:
        deadlines = [self._table.next_deadline(), self._stop_at, *(p.since + _GREETING_S for p in self._strangers)]
        first = min((d for d in deadlines if d is not None), default=None)
        for key, events in self._selector.select(None if first is None else max(0.0, first - time.monotonic())):
            peer = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif peer in self._peers:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ and peer in self._peers:
                    self._read(peer)
        now = time.monotonic()
        self._reply(self._table.expire(now))
        for peer in [p for p in self._strangers if p.since + _GREETING_S <= now]:
            self._drop(peer, "said nothing that makes sense in time")

    def _accept(self) -> None:
        for _ in range(_GREETING_PEERS):
            try:
                sock, where = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left
                _log.warning("%s cannot accept a connection: %s", self.address, error)
                self._evict() if self._strangers else time.sleep(0.05)
                return
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                pid, uid, _ = _credentials(sock)
                name = f"pid {pid}"
                if uid != os.geteuid():
                    _log.warning("%s refused %s of user %d", self.address, name, uid)
                    sock.close()
                    continue
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                name = str(where[0]).removeprefix("::ffff:")
            if len(self._strangers) >= _GREETING_PEERS:
                self._evict()
            peer = _Peer(sock, name, Greeting(self._secret, os.urandom(_NONCE)), time.monotonic())
            self._peers[peer] = self._strangers[peer] = None
            self._selector.register(sock, peer.events, peer)
            self._read(peer)  # a real client has spoken by now, and is through before the next idle one comes

    def _evict(self) -> None:
        def worth(peer: _Peer) -> tuple[bool, float]:
            return peer.greeting is not None and peer.greeting.begun, peer.since

        self._drop(min(self._strangers, key=worth), "had to make room")

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 16 if peer.greeting is None else 1 << 12)
            if not data:
                raise WireError("it closed the connection")
            peer.decoder.feed(data)
            while peer in self._peers and (frame := peer.decoder.next()) is not None:
                if peer.greeting is None:
                    self._serve(peer, frame)
                else:
                    self._greet(peer, peer.greeting, frame)
        except BlockingIOError:
            return
        except ConfigError as error:
            self._refuse(peer, str(error))
        except (OSError, WireError, msgspec.MsgspecError, RecursionError) as error:
            self._drop(peer, str(error))

    def _greet(self, peer: _Peer, greeting: Greeting, frame: bytes) -> None:
        try:
            answer = greeting.step(frame)
        except SecretError:
            raise
        except ConfigError:
            self._send(peer, _VERSION)  # so that the other side can say so, too
            raise
        if answer is not None:
            self._send(peer, answer)
        else:
            peer.greeting = None
            peer.decoder.limit = FRAME_LIMIT
            del self._strangers[peer]

    def _serve(self, peer: _Peer, frame: bytes) -> None:
        if self._table.waits(peer) or peer.out:
            raise WireError("a request before the reply to the last one")
        try:
            due = self._table.handle(peer, _decode_request(frame), time.monotonic())
        except msgspec.ValidationError as error:
            due = [(peer, Failed(f"a wrong argument: {error}"))]
        self._reply(due)

    def _reply(self, due: list[tuple[Hashable, Reply]]) -> None:
        for who, reply in due:
            if isinstance(who, _Peer) and who in self._peers:
                payload = _encode(reply)
                if len(payload) > FRAME_LIMIT:
                    payload = _encode(Failed(f"a reply of {len(payload)} bytes, the limit is {FRAME_LIMIT}"))
                self._send(who, payload)

    def _send(self, peer: _Peer, payload: bytes) -> None:
        peer.out += pack_frame(payload)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            del peer.out[: peer.sock.send(peer.out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(peer, str(error))
            return
        # A peer that does not take its replies is not heard either: it cannot make the server hoard them.
        events = selectors.EVENT_WRITE if peer.out else selectors.EVENT_READ
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.sock, events, peer)

    def _refuse(self, peer: _Peer, why: str) -> None:
        if peer.name not in self.refusals and len(self.refusals) < 16:
            self.refusals[peer.name] = f"{peer.name} was refused: {why}"
            _log.warning("%s: %s was refused: %s", self.address, peer.name, why)
        self._drop(peer)

    def _drop(self, peer: _Peer, why: str = "the server ends") -> None:
        _log.debug("%s: %s is dropped: %s", self.address, peer.name, why)
        del self._peers[peer]
        self._strangers.pop(peer, None)
        self._table.forget(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()


def _port_holder(port: int) -> str:
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdecimal, os.listdir("/proc")) if sockets else ():
        with suppress(OSError):  # another user's process, or one that has just ended
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") in sockets for fd in os.listdir(f"/proc/{pid}/fd")):
                return f", held by pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return ""


# --- the secret -----------------------------------------------------------------------------------------------


def load_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret that guards TCP stores.

    It is ALLRANKS_SECRET, or what ALLRANKS_SECRET_FILE holds, or this user's own, which is made on first use in
    ``$XDG_CONFIG_HOME`` (else ``~/.config``) ``/allranks/secret``, and which hosts with one home share.

    Raises:
        ConfigError: it is too short, cannot be read, or others can read it.
    """
    if secret := environ.get("ALLRANKS_SECRET", "").strip():
        return _checked(secret.encode(), "ALLRANKS_SECRET")
    if name := environ.get("ALLRANKS_SECRET_FILE"):
        return _read_secret(Path(name))
    config = environ.get("XDG_CONFIG_HOME", "")
    path = (Path(config) if os.path.isabs(config) else Path("~/.config").expanduser()) / "allranks" / "secret"
    try:
        if not path.exists():
            _make_secret(path)
        return _read_secret(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"Cannot make a secret in {path}: {reason(error)}. Set ALLRANKS_SECRET instead.") from None


def _make_secret(path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f"secret.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(32).hex() + "\n")
        # Unlike a rename, a link leaves alone what another rank, starting at the same moment, has made.
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_secret(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"Cannot read the secret in {path}: {reason(error)}.") from None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise ConfigError(
            f"The secret in {path} is not safe: owner {status.st_uid}, mode {status.st_mode & 0o777:04o}."
            f" Expected owner {os.geteuid()}, mode 0600.\n"
            f"  Run chmod 600 {path}, or, if others may have read it, remove it: a new one is made."
        )
    return _checked(secret, str(path))


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < 16:
        raise ConfigError(f"The secret in {source} has {len(secret)} bytes. Expected 16 or more: openssl rand -hex 32")
    return secret
