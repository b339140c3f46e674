"""TLS for the TCP connections of stores: optional, mutual, and below the handshake of `handshake`.

Without TLS, everyone who can read the network sees what the ranks exchange when they join. ALLRANKS_TLS_CERT,
ALLRANKS_TLS_KEY and ALLRANKS_TLS_CA encrypt it, and a peer without a certificate of the authority is refused. Host
names are not compared, because ranks connect to addresses that no certificate contains. Both sides also prove the
secret inside the connection.

Like the handshake, this module only converts bytes, so no client can make the server's one thread wait. ``ssl`` is
imported when it is needed, because its import would delay every start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError
from allranks._net.frames import SET_TLS, TlsError, WireError, pack_frame
from allranks._net.handshake import WANTS_TLS

if TYPE_CHECKING:
    import ssl

__all__ = ["Tls", "tls_context"]

_CERT, _KEY, _CA = _NAMES = ("ALLRANKS_TLS_CERT", "ALLRANKS_TLS_KEY", "ALLRANKS_TLS_CA")
_RECORDS = (b"\x15", b"\x16")  # first byte of a TLS record: an alert, or a handshake
_OPENSSL = "\n  See docs/security.md for the openssl commands."


def tls_context(server_side: bool, environ: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """Return the settings of one side's connections; None if no ALLRANKS_TLS_ variable is set.

    Both sides must show a certificate that the authority has signed. The lowest version is TLS 1.2.

    Raises:
        ConfigError: Only some of the variables are set, a file cannot be used, other users can read the key, or the
            key does not belong to the certificate.
    """
    files = {name: environ.get(name, "").strip() for name in _NAMES}
    if not any(files.values()):
        return None
    if missing := [name for name, file in files.items() if not file]:
        given = ", ".join(name for name, file in files.items() if file)
        raise ConfigError(
            f"{given} is set, but {', '.join(missing)} is not.\n  Set all three or none of them: TLS needs this host's"
            f" certificate, its key, and the authority that signs the certificates of all hosts.{_OPENSSL}"
        )
    for name, file in files.items():
        _check_file(name, Path(file))
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Ranks dial addresses that no certificate contains. Both sides also prove the job's secret.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # no client resumes a session
    try:
        context.load_verify_locations(files[_CA])
    except ssl.SSLError as error:
        raise ConfigError(f"{_CA}={files[_CA]} holds no certificate in PEM ({_reason(error)}).{_OPENSSL}") from None

    def password() -> str:  # without this function, OpenSSL prompts for a password on the terminal
        raise ConfigError(
            f"{_KEY}={files[_KEY]} is encrypted. Expected a key without a password, in a file of mode 0600.\n"
            f"  Decrypt it with `openssl pkey -in {files[_KEY]} -out FILE`."
        )

    try:
        context.load_cert_chain(files[_CERT], files[_KEY], password)
    except ssl.SSLError as error:
        what = "is not the key of" if error.reason == "KEY_VALUES_MISMATCH" else "cannot be used with"
        raise ConfigError(
            f"{_KEY}={files[_KEY]} {what} {_CERT}={files[_CERT]} ({_reason(error)}). Expected a certificate and its own"
            f" key, both in PEM.{_OPENSSL}"
        ) from None
    return context


def _check_file(name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.read(1)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"{name}={path} cannot be read: {why}. Expected a file in PEM.{_OPENSSL}") from None
    if name == _KEY and (status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077):
        raise ConfigError(
            f"{name}={path} is not safe: owner {status.st_uid}, mode {status.st_mode & 0o777:04o}."
            f" Expected owner {os.geteuid()}, mode 0600.\n"
            f"  Run chmod 600 {path}. If other users may have read it, create a new key and certificate."
        )


class Tls:
    """One side of one connection: takes the bytes that the peer has sent, and returns the bytes to send.

    Data that is encrypted before the handshake ends is sent immediately after it, in the same packet. A server that
    refuses the certificate has then read all of it, so its reason arrives before the end of the connection.

    Attributes:
        begun: The peer has sent TLS.
    """

    def __init__(self, context: ssl.SSLContext, server_side: bool) -> None:
        import ssl

        self.begun = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._in, self._out, server_side)
        self._handshake_done = False
        self._unsealed = b""
        self._answer = b""  # unencrypted reply to a peer that does not use TLS

    @property
    def channel(self) -> bytes:
        """The client's last handshake message: a hash of the handshake under the keys of this connection.

        It differs between connections, with TLS 1.2 (tls-unique, RFC 5929) and with 1.3. It is known when the first
        bytes have been decrypted.
        """
        return self._engine.get_channel_binding("tls-unique") or b""

    def seal(self, data: bytes) -> bytes:
        """Encrypt data for the peer. Return the bytes to send, which may begin with bytes of the handshake."""
        self._unsealed += data
        self._advance()
        return self.due()

    def receive(self, data: bytes) -> bytes:
        """Decrypt the next bytes from the peer. Call ``due`` afterwards, also if this raises an error.

        Raises:
            TlsError: The peer does not use TLS, or the two sides do not accept each other.
            WireError: The peer uses another protocol, or has ended the connection.
        """
        if not self.begun:
            if data.startswith(b"\0"):  # a frame without TLS: handshake frames are short, so the length begins with 0
                self._answer = pack_frame(WANTS_TLS)
                raise TlsError(f"it does not use TLS, but this process does; {SET_TLS}")
            if not data.startswith(_RECORDS):
                raise WireError(f"it uses neither TLS nor allranks's protocol: {data[:40]!r}")
            self.begun = True
        self._in.write(data)
        self._advance()
        plain = b""
        while self._handshake_done and (part := self._read()):
            plain += part
        return plain

    def due(self) -> bytes:
        """Return the bytes to send to the peer: of the handshake, or an alert."""
        answer, self._answer = self._answer, b""
        return self._out.read() + answer

    def _advance(self) -> None:
        import ssl

        try:
            if not self._handshake_done:
                self._engine.do_handshake()
                self._handshake_done = True
            while self._unsealed:
                self._unsealed = self._unsealed[self._engine.write(self._unsealed) :]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explain(error)) from None

    def _read(self) -> bytes:
        import ssl

        try:
            if part := self._engine.read(1 << 16):
                return part
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explain(error)) from None
        raise WireError("it closed the connection")


def _explain(error: ssl.SSLError) -> str:
    if why := getattr(error, "verify_message", ""):
        return f"this process does not accept its certificate ({why}); {SET_TLS}"
    if "ALERT" in (error.reason or ""):
        return f"it does not accept the certificate or the TLS settings of this process ({_reason(error)}); {SET_TLS}"
    return f"TLS with it failed ({_reason(error)}); {SET_TLS}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
