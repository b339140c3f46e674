"""Checks of this host as other hosts reach it: its name, its interfaces, its ports."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from allranks._cluster.env import read_int, split_host_port
from allranks._cluster.network import interface_of, published_addresses
from allranks._store.address import call_with_timeout
from allranks.tools.doctor.check import Finding, fail, ok, warn
from allranks.tools.doctor.job import job_here

__all__ = ["CHECKS", "judge_name", "judge_port"]

_USUAL_PORT = 29500  # the default of torchrun and torch.distributed.launch
_PATIENCE_S = 5.0  # timeout of name resolution and of connections
_SLOW_S = 1.0  # a name service that takes longer is slow
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_name() -> Finding:
    """Resolve the name of this host, which programs publish as its address."""
    name = socket.gethostname()
    began = time.monotonic()
    nothing: tuple[list[str], str] = ([], f"no answer in {_PATIENCE_S:g} s")
    addresses, trouble = call_with_timeout(lambda: _resolve(name), nothing, _PATIENCE_S)
    return judge_name(name, addresses, trouble, published_addresses({}), time.monotonic() - began)


def judge_name(
    name: str, addresses: Sequence[str], trouble: str, published: Sequence[str], seconds: float = 0.0
) -> Finding:
    """Check whether another host could use the addresses of the name.

    Args:
        name: The name of this host.
        addresses: The addresses to which the name resolves here.
        trouble: Why the name does not resolve.
        published: The addresses of this host's interfaces, without loopback and container bridges.
        seconds: How long the name service took.
    """
    described = f"{name} is {', '.join(addresses) or f'unknown ({trouble})'}"
    if not published:
        return ok(f"{described}; this host has no network, so no other host uses it")
    line = f"add the line '{published[0]} {name}' to /etc/hosts"
    others = (
        "allranks does not connect to it. gloo, torchrun and some MPIs do, and fail between hosts: "
        f"set GLOO_SOCKET_IFNAME={interface_of(published[0]) or 'eth0'}, or {line}."
    )
    if not addresses:
        return warn(described, others)
    loopback = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if len(loopback) == len(addresses):
        return warn(f"{described}, which on another host means that host itself", others)
    foreign = [address for address in addresses if address not in published and address not in loopback]
    if foreign and len(foreign) + len(loopback) == len(addresses):
        return warn(f"{described}, which is not an address of this host ({', '.join(published)})", others)
    if seconds > _SLOW_S:
        return warn(f"{described}, after {seconds:.1f} s", f"The name service is slow. To avoid it, {line}.")
    return ok(described)


def interfaces() -> Finding:
    """Check the addresses that this host publishes, and the variables that name interfaces."""
    published = published_addresses()  # raises if ALLRANKS_IFACE is wrong, and lists the interfaces
    here = {name for _, name in socket.if_nameindex()}
    wrong = [f"{name}={os.environ[name]}" for name in _CHOICES if not _names_one(os.environ.get(name, ""), here)]
    described = ", ".join(f"{interface_of(address)} {address}{_mtu(interface_of(address))}" for address in published)
    if wrong:
        return fail(
            f"{described or 'none'}; {', '.join(wrong)} matches none of {', '.join(sorted(here))}",
            f"Unset {' and '.join(each.partition('=')[0] for each in wrong)}, or set the name of an existing"
            " interface.",
        )
    if not published:
        return ok("none: ranks of this host only")
    chosen = f" (ALLRANKS_IFACE={os.environ['ALLRANKS_IFACE']})" if os.environ.get("ALLRANKS_IFACE") else ""
    return ok(described + chosen)


def ports() -> Finding:
    """Check that a port can be bound and reached on each address."""
    reached = []
    for address in ("127.0.0.1", *published_addresses()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            server.settimeout(_PATIENCE_S)
            where = server.getsockname()[:2]
            try:
                with socket.create_connection(where, timeout=_PATIENCE_S) as client:
                    accepted, _ = server.accept()
                    with accepted:
                        client.sendall(b"here")
                        accepted.settimeout(_PATIENCE_S)
                        answer = accepted.recv(4)
            except OSError as error:
                return fail(
                    f"{address}: this host cannot connect to its own port: {error}",
                    "Loopback is down. Run `ip link set lo up`."
                    if error.errno == errno.ENETUNREACH
                    else "A firewall may block the connection. Check: nft list ruleset, or iptables -L.",
                )
        if answer != b"here":
            return fail(
                f"{address}: sent b'here', received {answer!r}",
                "Another program answers at this host's address. Check for a proxy.",
            )
        reached.append(address)
    return ok(f"one each bound and reached on {', '.join(reached)}")


def master_port() -> Finding:
    """Check that the port on which rank 0 is to listen is free."""
    here = job_here()
    if here.world_size > 1 and (here.rank != 0 or here.master is None):
        return ok("not needed here")
    _, by_address = split_host_port(os.environ.get("MASTER_ADDR", ""), "MASTER_ADDR")
    port = read_int(os.environ, "MASTER_PORT", 1, 65535) or by_address or _USUAL_PORT
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with socket.socket() as probe:
        # As the server does. Without it, connections of an earlier job in TIME_WAIT make the port appear taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return judge_port(port, (low, high), error)
    return judge_port(port, (low, high), None)


def judge_port(port: int, ephemeral: tuple[int, int], error: OSError | None) -> Finding:
    """Check whether rank 0 can rely on the port.

    Args:
        port: The port.
        ephemeral: The first and the last port that the kernel assigns to outgoing connections.
        error: The error of binding the port.
    """
    if error is not None and error.errno == errno.EADDRINUSE:
        return warn(
            f"{port} is taken", f"Find its process with `ss -ltnp 'sport = :{port}'`, or set another MASTER_PORT."
        )
    if error is not None:
        return fail(f"{port}: {error.strerror}", "Choose another port: MASTER_PORT=29501.")
    if ephemeral[0] <= port <= ephemeral[1]:
        return warn(
            f"{port} is free, but any connection may take it: it is one of {ephemeral[0]}-{ephemeral[1]}",
            f"Choose a port below {ephemeral[0]}.",
        )
    return ok(f"{port} is free")


def _resolve(name: str) -> tuple[list[str], str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(getattr(error, "strerror", None) or error).lower()
    return list(dict.fromkeys(str(where[0]) for *_, where in found)), ""


def _names_one(wanted: str, here: set[str]) -> bool:
    """Return whether a value names an existing interface, by the rules of gloo and NCCL.

    The value lists names or prefixes of names. ``=`` requires exact names, ``^`` excludes names.
    """
    words = [word for word in wanted.removeprefix("=").split(",") if word]
    return not words or wanted.startswith("^") or any(name.startswith(word) for word in words for name in here)


def _mtu(interface: str) -> str:
    file = Path("/sys/class/net") / interface / "mtu"
    return f" (MTU {file.read_text().strip()})" if interface and file.exists() else ""


CHECKS: tuple[Callable[[], Finding], ...] = (host_name, interfaces, ports, master_port)
