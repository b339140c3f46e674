"""The handshake of every connection: both sides prove that they have the same secret, without sending it.

    client -> server   protocol and version, subject, client's nonce
    server -> client   protocol and version, server's nonce, server's proof
    client -> server   client's proof
    server -> client   verdict

The subject names the purpose of the connection (for connections between ranks: group, ranks, kind). It is empty if a
port has one purpose. A proof is an HMAC-SHA256 over the version, the role of the prover, the subject, both nonces and,
under TLS, the identity of the TLS connection. A replayed proof, a proof reflected to its sender, and a proof relayed to
another connection or purpose are therefore invalid.

Bytes in, bytes out: without sockets and clocks, so that it can be tested on any input.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from typing import NamedTuple

from allranks._base.errors import ConfigError, SecretError
from allranks._net.frames import SET_TLS, TlsError, WireError

__all__ = [
    "DECLINED",
    "HANDSHAKE_FRAME",
    "HANDSHAKE_S",
    "NONCE",
    "PROVED",
    "UNKNOWN",
    "WANTS_TLS",
    "ClientHandshake",
    "Protocol",
    "ServerHandshake",
    "UnknownSubject",
]

HANDSHAKE_FRAME = 256
"""The largest frame of a handshake, in bytes. A server keeps no more of a peer that has not proved the secret."""

HANDSHAKE_S = 5.0
"""Seconds until a server drops a peer that has not completed its handshake."""

NONCE = 32

PROVED = b"in"
"""Verdict: the client is accepted. A server may drop a client earlier to free its slot; the client then dials again."""

DECLINED = b"no"
"""Verdict: the client has the secret, but the server does not need this connection."""

UNKNOWN = b"unknown"
"""Second frame, from a server that does not know the subject."""

WANTS_TLS = b"allranks/tls"
"""Second frame, from a server with TLS to a client without it."""

_SHARE_SECRET = (
    "use the same secret on both sides: set ALLRANKS_SECRET, or ALLRANKS_SECRET_FILE, or copy the file"
    " ~/.config/allranks/secret (mode 0600) from one host to the other"
)

_FAMILY = b"allranks-"  # begins the name of every protocol
_KNOCK = b"\r\n\r\n"  # ends the first frame, so that servers of text protocols (HTTP, SMTP, Redis) answer immediately


class UnknownSubject(WireError):
    """The server does not know the subject of the connection, for example a group that it has not created yet."""


class Protocol(NamedTuple):
    """The protocol that a port serves.

    Attributes:
        name: Ends with "/".
        version: Number of the version. Both sides must have the same one.
        subject: Size of the subject in bytes.
    """

    name: bytes
    version: bytes
    subject: int = 0

    @property
    def head(self) -> bytes:
        """The first bytes of the first two frames."""
        return self.name + self.version

    def proof(self, key: bytes, role: bytes, subject: bytes, nonces: bytes) -> bytes:
        """Return the proof that the process in this role, ``client`` or ``server``, has the key."""
        return hmac.digest(key, self.head + b"|" + role + b"|" + subject + nonces, "sha256")

    def check_version(self, head: bytes) -> None:
        """Raise unless these are the first bytes of the same protocol and version."""
        if not head.startswith(_FAMILY):
            raise WireError("it does not use allranks's protocol")
        if not head.startswith(self.name):
            raise ConfigError(
                f"it uses {head[:24]!r}, but this process uses {self.head!r}: the port belongs to another service of"
                " allranks, or to another version; check the address, and install one version on all hosts"
            )
        if head != self.head:
            raise ConfigError(
                f"it uses {head[:24]!r}, but this process uses {self.head!r}; install one version on all hosts"
            )


class ServerHandshake:
    """The server's half of one handshake.

    Args:
        protocol: The protocol of the port.
        key_of: Returns the key for a subject, or None if the subject is unknown.

    Attributes:
        subject: The subject that the client sent.
        begun: The client has sent a valid first frame.
    """

    def __init__(self, protocol: Protocol, key_of: Callable[[bytes], bytes | None], nonce: bytes | None = None) -> None:
        self.subject = b""
        self.begun = False
        self._protocol = protocol
        self._key_of = key_of
        self._nonce = os.urandom(NONCE) if nonce is None else nonce
        self._expected = b""

    @property
    def head(self) -> bytes:
        """Protocol and version: the answer to a client of another version, whose error then names both."""
        return self._protocol.head

    def step(self, frame: bytes, channel: bytes = b"") -> bytes | None:
        """Process the next frame of the client.

        Args:
            frame: The frame.
            channel: Identity of the TLS connection (``Tls.channel``).

        Returns:
            The answer. None if the client has proved the secret; the caller then sends the verdict.

        Raises:
            WireError: The peer is not a client of this protocol.
            UnknownSubject: The subject is unknown. The caller answers ``UNKNOWN``.
            ConfigError: The client has another version, or (SecretError) another secret.
        """
        if self.begun:
            # In constant time, so that the time does not reveal how many bytes are right.
            if not hmac.compare_digest(frame, self._expected):
                raise SecretError(f"its secret differs from this process's; {_SHARE_SECRET}")
            return None
        end = len(frame) - len(_KNOCK)
        begin = end - NONCE - self._protocol.subject
        self._protocol.check_version(frame[: max(begin, 0)])
        self.subject, nonce = frame[begin : end - NONCE], frame[end - NONCE : end]
        key = self._key_of(self.subject)
        if key is None:
            raise UnknownSubject("it requested a group that this process does not know")
        nonces = nonce + self._nonce + channel
        self._expected = self._protocol.proof(key, b"client", self.subject, nonces)
        self.begun = True
        return self.head + self._nonce + self._protocol.proof(key, b"server", self.subject, nonces)


class ClientHandshake:
    """The client's half of one handshake."""

    def __init__(self, protocol: Protocol, key: bytes, subject: bytes = b"", nonce: bytes | None = None) -> None:
        self._protocol = protocol
        self._key = key
        self._subject = subject
        self._nonce = os.urandom(NONCE) if nonce is None else nonce
        self._right = False

    def begin(self) -> bytes:
        """Return the first frame."""
        return self._protocol.head + self._subject + self._nonce + _KNOCK

    def prove(self, frame: bytes, channel: bytes = b"") -> bytes:
        """Return the proof for the server's answer. Send it, then call `check_server`.

        The proof is sent even if the server's own proof is wrong, so that the server can report the difference, too.

        Args:
            frame: The answer of the server.
            channel: Identity of the TLS connection (``Tls.channel``).

        Raises:
            WireError: The peer is not a server of this protocol.
            UnknownSubject: The server does not know the subject, or not yet.
            TlsError: The server uses TLS, and this process does not.
            ConfigError: The server has another version.
        """
        if frame == WANTS_TLS:
            raise TlsError(f"it uses TLS, but this process does not; {SET_TLS}")
        if frame == UNKNOWN:
            raise UnknownSubject("it has not created this group yet, or has closed it")
        head, server_nonce, proof = frame[: -2 * NONCE], frame[-2 * NONCE : -NONCE], frame[-NONCE:]
        # A server of another version sends only its head, without nonce and proof.
        self._protocol.check_version(frame if len(frame) < 2 * NONCE else head)
        nonces = self._nonce + server_nonce + channel
        expected = self._protocol.proof(self._key, b"server", self._subject, nonces)
        self._right = hmac.compare_digest(proof, expected)
        return self._protocol.proof(self._key, b"client", self._subject, nonces)

    def check_server(self) -> None:
        """Raise SecretError if the proof of the server was wrong."""
        if not self._right:
            raise SecretError(f"its secret differs from this process's; {_SHARE_SECRET}")
