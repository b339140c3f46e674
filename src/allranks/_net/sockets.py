"""Options and facts of sockets that all connections share."""

from __future__ import annotations

import errno
import os
import socket
import struct

from allranks._base.errors import ConfigError

__all__ = ["check_connected", "keep_alive", "unix_peer"]

_CREDENTIALS = struct.Struct("3i")


def keep_alive(sock: socket.socket, lost_after_s: int | None = None, *, must_read: bool = True) -> None:
    """Let the kernel detect that the other host has vanished. No effect on unix sockets.

    The kernel probes an idle connection six times. Because TCP doubles the time between its own attempts, a limit of
    15 s survives a network cut of 7 s: the attempt after such a cut may follow 14 s after its beginning.

    Args:
        sock: The connection.
        lost_after_s: Seconds until a vanished host ends the connection, 8 at least. None: the system's setting, which
            is two hours on most systems.
        must_read: Also end the connection if the peer acknowledges no data for this long. A peer that does not read
            counts as well, because its closed window is unacknowledged data for the kernel: False if the peer may
            stop reading, as a rank that computes.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if lost_after_s is None:
        return
    # The idle time and six intervals add up to `lost_after_s`.
    interval = lost_after_s // 7
    idle = lost_after_s - 6 * interval
    for option, value in ((socket.TCP_KEEPIDLE, idle), (socket.TCP_KEEPINTVL, interval), (socket.TCP_KEEPCNT, 6)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if must_read:  # keepalive probes are not sent while data is unacknowledged
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_s * 1000)


def unix_peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user at the other end of a unix socket, as the kernel knows them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def check_connected(sock: socket.socket) -> None:
    """Check that a new connection leads to a server that may be trusted with a handshake.

    Raises:
        ConfigError: The process at the other end of a unix socket belongs to another user.
        ConnectionRefusedError: The socket has connected to itself.
    """
    if sock.family == socket.AF_UNIX:
        _, uid = unix_peer(sock)
        if uid != os.geteuid():
            raise ConfigError(
                f"it belongs to user {uid}, but this process to user {os.geteuid()}; run both as one user"
            )
    # Repeated attempts to connect to a local port on which no process listens can meet TCP's simultaneous open.
    elif sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
