"""The secret that guards TCP ports: from the environment, from a file, or created on first use.

On one host, and on hosts that share a home directory, no setup is needed. On other hosts the user copies one file. A
secret that other users can read is refused. The launcher has further ways to pass the secret to its ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from allranks._base.errors import ConfigError
from allranks._base.system import reason

__all__ = ["load_secret", "own_secret", "store_secret"]

_log = logging.getLogger("allranks.store")


def load_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that guards TCP ports.

    It is ALLRANKS_SECRET, else the content of ALLRANKS_SECRET_FILE, else this user's own secret. The last one is
    created on first use in ``$XDG_CONFIG_HOME/allranks/secret`` or ``~/.config/allranks/secret``; hosts that share a
    home directory share it.

    With ALLRANKS_INSECURE=1 there is no secret: every process that can reach the ports can join, and read and change
    the data.

    Raises:
        ConfigError: The secret is too short, cannot be read, or other users can read it.
    """
    if environ.get("ALLRANKS_INSECURE", "").strip() not in ("", "0"):
        _log.warning("ALLRANKS_INSECURE is set: any process that can reach the ports of this job can join it")
        return b"allranks: no secret"  # equal on all ranks, and not empty: a TCP server refuses an empty secret
    if secret := environ.get("ALLRANKS_SECRET", "").strip():
        return _checked(secret.encode(), "ALLRANKS_SECRET")
    if name := environ.get("ALLRANKS_SECRET_FILE"):
        return _read_secret(Path(name))
    try:
        path = own_secret(environ)
        if not path.exists():
            _make_secret(path)
    except OSError as error:
        raise ConfigError(
            f"Cannot create this user's secret in {environ.get('XDG_CONFIG_HOME') or '~/.config'}/allranks:"
            f" {reason(error)}.\n  Set ALLRANKS_SECRET, the same on all ranks, or XDG_CONFIG_HOME."
        ) from None
    return _read_secret(path)


def store_secret(secret: bytes, salt: str) -> bytes:
    """Return the secret of a job's store. Both sides of a connection can compute it, so it is never sent.

    Args:
        secret: The secret that was proved in the handshake.
        salt: Text of this job only; it need not be secret.
    """
    return hmac.digest(secret, b"allranks store|" + salt.encode(), hashlib.sha256).hex().encode()


def own_secret(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of this user's own secret, which need not exist.

    Raises:
        ConfigError: This user has no home directory.
    """
    config = environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(config) if os.path.isabs(config) else Path.home() / ".config"
    except RuntimeError:
        raise ConfigError(
            f"User {os.geteuid()} has no home directory for its secret.\n"
            "  Set ALLRANKS_SECRET, the same on all ranks, or XDG_CONFIG_HOME."
        ) from None
    return folder / "allranks" / "secret"


def _make_secret(path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # With random digits, because processes of hosts with a common home may have equal pids.
    draft = path.with_name(f"secret.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(32).hex() + "\n")
        # A link fails if another rank has created the secret at the same moment. A rename would replace that secret.
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_secret(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # Of the open file: the path could lead to another file between the check and the read.
            status = os.fstat(file.fileno())
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            f"Cannot read the secret in {path}: {reason(error)}.\n"
            "  Make it a file that this user can read, or set ALLRANKS_SECRET, the same on all ranks."
        ) from None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise ConfigError(
            f"The secret in {path} is not safe: owner {status.st_uid}, mode {status.st_mode & 0o777:04o}."
            f" Expected owner {os.geteuid()}, mode 0600.\n"
            f"  Run chmod 600 {path}. If other users may have read it, remove it: allranks then creates a new secret."
        )
    return _checked(secret, str(path))


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < 16:
        raise ConfigError(
            f"The secret in {source} has {len(secret)} bytes. Expected 16 or more.\n"
            "  Create one with `openssl rand -hex 32`."
        )
    return secret
