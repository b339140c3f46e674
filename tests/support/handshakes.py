"""The individual frames of a handshake, for tests that communicate directly with a server or a client."""

from __future__ import annotations

from allranks._base.errors import SecretError
from allranks._net.handshake import ClientHandshake, Protocol, ServerHandshake
from allranks._store.wire import PROTOCOL

__all__ = ["first_frame", "prove", "server_side"]


def first_frame(nonce: bytes, protocol: Protocol = PROTOCOL, subject: bytes = b"") -> bytes:
    """Return the client's first frame."""
    return ClientHandshake(protocol, b"", subject, nonce).begin()


def server_side(secret: bytes, nonce: bytes, protocol: Protocol = PROTOCOL) -> ServerHandshake:
    """Return the server's half of a handshake for any subject."""
    return ServerHandshake(protocol, lambda subject: secret, nonce)


def prove(
    secret: bytes, nonce: bytes, answer: bytes, channel: bytes = b"", protocol: Protocol = PROTOCOL
) -> tuple[bytes, bool]:
    """Return the client's proof, and whether the proof in the server's answer was right."""
    handshake = ClientHandshake(protocol, secret, nonce=nonce)
    proof = handshake.prove(answer, channel)
    try:
        handshake.check_server()
    except SecretError:
        return proof, False
    return proof, True
