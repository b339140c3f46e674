"""What travels between a store's client and server: frames, the handshake, requests and replies.

Bytes in, bytes out: no socket and no clock, so that all of it can be tested on any input.

The first three frames (``_base.frames``) are the handshake: version and nonce; version, nonce and the server's proof;
the client's proof. A proof is an HMAC-SHA256 over the version, the prover's role and both nonces, so that neither a
replayed nor a reflected one is worth anything. Typed msgspec structs follow.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import msgspec

from allranks._base import frames
from allranks._base.errors import ConfigError, SecretError
from allranks._base.frames import FrameError

__all__ = [
    "Add",
    "Append",
    "CompareSet",
    "Delete",
    "Done",
    "FRAME_LIMIT",
    "Failed",
    "Found",
    "FrameDecoder",
    "GREETING_LIMIT",
    "GREETING_S",
    "Greeting",
    "KNOCK",
    "LONGEST_S",
    "Late",
    "Length",
    "Listed",
    "NONCE",
    "PROVED",
    "Names",
    "Peek",
    "Pop",
    "Push",
    "Reply",
    "Request",
    "SET_TLS",
    "SHARE_SECRET",
    "Set",
    "SetMany",
    "TlsError",
    "VERSION",
    "WANTS_TLS",
    "Wait",
    "WireError",
    "answer_greeting",
    "decode_reply",
    "decode_request",
    "encode",
]

FRAME_LIMIT = 16 << 20
"""Largest frame, and so about the largest value, between peers that have proved themselves."""

GREETING_LIMIT = 256
"""The same before they have."""

GREETING_S = 5.0
"""How long either side lets the handshake take."""

LONGEST_S = 2e6
"""The longest wait that epoll takes, which counts milliseconds in 31 bits; three weeks."""

_PROTOCOL = b"allranks-store/"
VERSION = _PROTOCOL + b"3"
WANTS_TLS = _PROTOCOL + b"tls"  # what a server with TLS answers to a client without it
PROVED = b"in"
"""Ends the handshake: a server may drop a client before, to make room for another, and then the client dials again."""

NONCE = 32
KNOCK = b"\r\n\r\n"  # ends the first frame: a stranger who reads lines (HTTP, SMTP, Redis) answers at once

SHARE_SECRET = (
    "give both sides the same one: set ALLRANKS_SECRET, or ALLRANKS_SECRET_FILE, or copy the file"
    " ~/.config/allranks/secret (mode 0600) from one host to the other"
)


SET_TLS = (
    "set ALLRANKS_TLS_CERT, ALLRANKS_TLS_KEY and ALLRANKS_TLS_CA on both sides, with certificates that the same"
    " authority signed, or on neither"
)


class WireError(FrameError):
    """A peer broke the protocol. Internal: its connection is dropped."""


class TlsError(WireError):
    """A peer speaks TLS where we do not, or not as we do. Both sides report it."""


# --- frames and the handshake: pure ---------------------------------------------------------------------------


class FrameDecoder(frames.FrameDecoder):
    """The frames of a peer that may be a stranger. Raises WireError, or TlsError where the peer begins with TLS."""

    def _refusal(self, head: bytes, length: int) -> WireError:
        if head.startswith(b"\x16\x03"):
            return TlsError(f"it uses TLS, this process does not; {SET_TLS}")
        return WireError(str(super()._refusal(head, length)))


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, channel: bytes) -> bytes:
    return hmac.digest(secret, VERSION + b"|" + role + b"|" + client_nonce + server_nonce + channel, "sha256")


class Greeting:
    """The server's half of the handshake."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._nonce = nonce
        self._expected = b""

    @property
    def begun(self) -> bool:
        """Whether the peer has sent a valid greeting."""
        return bool(self._expected)

    def step(self, frame: bytes, channel: bytes = b"") -> bytes | None:
        """Takes the peer's next frame; returns the answer, or None when the peer has proved itself.

        Args:
            frame: what the peer sent.
            channel: what both ends of a TLS connection know of it, and of no other (``Tls.channel``). A proof that is
                relayed to another connection is wrong there.

        Raises:
            WireError: not an allranks client.
            ConfigError: one of another version, or (SecretError) with another secret.
        """
        if self._expected:
            if not hmac.compare_digest(frame, self._expected):
                raise SecretError(f"its secret differs from ours; {SHARE_SECRET}")
            return None
        version, nonce = frame[: -NONCE - len(KNOCK)], frame[-NONCE - len(KNOCK) : -len(KNOCK)]
        if not version.startswith(_PROTOCOL):
            raise WireError("not an allranks client")
        if version != VERSION:
            raise ConfigError(f"it uses {version!r}, this process {VERSION!r}; install one version on all hosts")
        self._expected = _proof(self._secret, b"client", nonce, self._nonce, channel)
        return VERSION + self._nonce + _proof(self._secret, b"server", nonce, self._nonce, channel)


def answer_greeting(secret: bytes, nonce: bytes, frame: bytes, channel: bytes = b"") -> tuple[bytes, bool]:
    """The client's half: returns its proof, and whether the server's was right. ``channel``: see ``Greeting.step``."""
    if not frame.startswith(_PROTOCOL):
        raise WireError("its answer is not of allranks' protocol")
    if frame == WANTS_TLS:
        raise TlsError(f"it uses TLS, this process does not; {SET_TLS}")
    version, server_nonce, proof = frame[: -2 * NONCE], frame[-2 * NONCE : -NONCE], frame[-NONCE:]
    if version != VERSION:
        raise ConfigError(f"uses another version ({frame[:24]!r}, this process {VERSION!r}): install one on all hosts")
    right = hmac.compare_digest(proof, _proof(secret, b"server", nonce, server_nonce, channel))
    return _proof(secret, b"client", nonce, server_nonce, channel), right


# --- requests and replies -------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Set(_Message, frozen=True):
    key: str
    value: bytes


class SetMany(_Message, frozen=True):
    keys: list[str]
    values: list[bytes]


class Add(_Message, frozen=True):
    key: str
    amount: int


class Append(_Message, frozen=True):
    key: str
    value: bytes


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


class Names(_Message, frozen=True):
    prefix: str


class Push(_Message, frozen=True):
    key: str
    value: bytes


class Pop(_Message, frozen=True):
    key: str
    timeout_s: float


class Length(_Message, frozen=True):
    key: str


class Done(_Message, frozen=True):
    number: int = 0


class Found(_Message, frozen=True):
    values: list[bytes | None]


class Listed(_Message, frozen=True):
    names: list[str]


class Late(_Message, frozen=True):
    missing: list[str]


class Failed(_Message, frozen=True):
    text: str


Request = Set | SetMany | Add | Append | Peek | Wait | Delete | CompareSet | Names | Push | Pop | Length
Reply = Done | Found | Listed | Late | Failed

encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(frame: bytes) -> Any:
        """Raises WireError, or msgspec.ValidationError where only an argument has a wrong type."""
        try:
            return decode(frame)
        except msgspec.ValidationError:
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from None

    return checked


decode_request: Callable[[bytes], Request] = _decoder(Request)
decode_reply: Callable[[bytes], Reply] = _decoder(Reply)
