"""The addresses on which a server listens for a host name, and a diagnosis of the name if no client connects.

The server listens on loopback, and on the addresses of this host to which the name resolves. Often other hosts reach
none of these addresses: a host's own name resolves to 127.0.1.1, or to the address of a gateway in front of the host.
The server then listens on the addresses that the host publishes. Both lookups have a time limit, in case the name
service does not answer.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

from allranks._base.threads import Daemon
from allranks._cluster.network import published_addresses

__all__ = ["addresses_of", "address_problem"]

_T = TypeVar("_T")
_PATIENCE_S = 2.0  # for the name service, whose own timeouts can be much longer


def addresses_of(host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses on which a server listens if its host name is ``host``.

    The first one is 127.0.0.1, unless the host is another loopback address. If ALLRANKS_IFACE is set, the others are
    loopback addresses and the addresses that it selects.

    Raises:
        ConfigError: ALLRANKS_IFACE matches no interface and no network of this host.
    """
    if host == "localhost":
        # IPv4 only: clients dial 127.0.0.1 for this name, too.
        return ["127.0.0.1"]
    if _is_loopback(host):
        return [host]
    nothing: list[str] = []
    resolved = (
        call_with_timeout(lambda: [a for a in _resolve(host) if _is_local(a)], nothing, _PATIENCE_S)
        if host
        else nothing
    )
    outer = [address for address in resolved if not _is_loopback(address)]
    if environ.get("ALLRANKS_IFACE", "").strip() or not outer:
        outer = list(published_addresses(environ))
    inner = [address for address in resolved if _is_loopback(address)]
    return list(dict.fromkeys(["127.0.0.1", *inner, *outer]))


def address_problem(host: str, patience_s: float = 1.0) -> str:
    """Return why clients that dial ``host`` may not reach this host; "" if no problem is found."""
    return call_with_timeout(lambda: _resolution_problem(host), f"does not resolve in {patience_s:g} s", patience_s)


def call_with_timeout(function: Callable[[], _T], default: _T, patience_s: float) -> _T:
    """Return the result of ``function`` if it returns within ``patience_s`` seconds, otherwise ``default``."""
    results = [default]
    # A daemon thread: the resolver cannot be interrupted, and a pending lookup must not delay the exit of the process.
    thread = Daemon(target=lambda: results.append(function()), name="allranks-resolve")
    thread.start()
    thread.join(patience_s)
    return results[-1]


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


def _is_local(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            # Linux binds only to addresses of this host, so no list of interfaces is needed.
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _resolution_problem(host: str) -> str:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"does not resolve ({str(getattr(error, 'strerror', None) or error).lower()})"
    for family, kind, _, _, target in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(target)
            except OSError as error:
                # Any other error does not show that the address belongs to another host.
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
            return ""
    return f"is not an address of this host ({socket.gethostname()})"
