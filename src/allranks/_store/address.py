"""Whether a host name means this host: what a server that waits in vain can say about the name it was given.

The server itself does not need the name (it listens on all interfaces), so nothing is asked before somebody waits,
and a name service that does not answer may not make that wait longer.
"""

from __future__ import annotations

import errno
import socket
import threading

__all__ = ["trouble_with"]


def trouble_with(host: str, patience_s: float = 1.0) -> str:
    """Says why clients that dial ``host`` may not come here; "" where nothing is known to be wrong."""
    found = [f"does not resolve in {patience_s:g} s"]

    def look() -> None:
        found.append(_look(host))

    thread = threading.Thread(target=look, name="allranks-resolve", daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[-1]


def _look(host: str) -> str:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"does not resolve ({str(getattr(error, 'strerror', None) or error).lower()})"
    for family, kind, _, _, target in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(target)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
            return ""
    return f"is not an address of this host ({socket.gethostname()})"
