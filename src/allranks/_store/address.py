"""Where a server listens that was given a host name, and what is wrong with the name if nobody comes.

It listens on this host's addresses that the name stands for, and on loopback. Often it stands for none that others
reach: a host's own name resolves to 127.0.1.1, or to an address in front of the host. Then it listens on the addresses
that the host publishes. A name service that does not answer may not hold it up, nor make a wait longer.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from allranks._cluster.network import published_addresses

__all__ = ["addresses_of", "trouble_with"]

_T = TypeVar("_T")
_PATIENCE_S = 2.0


def addresses_of(host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where a server listens that was given ``host``; first 127.0.0.1, unless the host is another loopback address.

    ALLRANKS_IFACE, where it is set, leaves loopback and the addresses that it chooses.

    Raises:
        ConfigError: ALLRANKS_IFACE names nothing that is here.
    """
    if host == "localhost":
        return ["127.0.0.1"]
    if _is_loopback(host):
        return [host]
    nothing: list[str] = []
    meant = in_time(lambda: [a for a in _resolve(host) if _is_here(a)], nothing, _PATIENCE_S) if host else nothing
    outer = [address for address in meant if not _is_loopback(address)]
    if environ.get("ALLRANKS_IFACE", "").strip() or not outer:
        outer = list(published_addresses(environ))
    inner = [address for address in meant if _is_loopback(address)]
    return list(dict.fromkeys(["127.0.0.1", *inner, *outer]))


def trouble_with(host: str, patience_s: float = 1.0) -> str:
    """Says why clients that dial ``host`` may not come here; "" where nothing is known to be wrong."""
    return in_time(lambda: _look(host), f"does not resolve in {patience_s:g} s", patience_s)


def in_time(look: Callable[[], _T], otherwise: _T, patience_s: float) -> _T:
    """What ``look`` returns, if it does so in time."""
    found = [otherwise]
    thread = threading.Thread(target=lambda: found.append(look()), name="allranks-resolve", daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[-1]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _resolve(host: str) -> list[str]:
    try:
        return [str(where[0]) for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _is_here(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


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
