"""The addresses at which other hosts can reach this host, and whether two processes run on one host.

A host's own name is of little use: on many hosts it resolves to 127.0.1.1, or to an address of a container's bridge.
Each process therefore publishes the addresses of its network interfaces. A process that connects to it tries them in
turn.

Source: Linux' netdevice(7) for the calls, proc(5) and the kernel's if_inet6 for the files.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import ipaddress
import itertools
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from allranks._base.errors import ConfigError
from allranks._base.forks import Socket

__all__ = ["MACHINE", "fixed_machine", "interface_of", "listen", "machine", "nearest_first", "published_addresses"]

MACHINE = "ALLRANKS_MACHINE"
"""Variable in which an agent passes the identity of its host to the ranks that it starts."""


_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 0x1, 0x8
_IFREQ = struct.Struct("16s16s8x")
# Interfaces of bridges to containers and virtual machines of this host. Other hosts cannot reach their addresses.
_INNER = ("docker", "br-", "virbr", "vmnet", "veth", "cni", "flannel", "cali", "lxc", "lxdbr", "podman")


_PORTS_TRIED = 50  # attempts to find a port that is free on all addresses


class _Interface(NamedTuple):
    name: str
    address: ipaddress.IPv4Interface | ipaddress.IPv6Interface


def published_addresses(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the addresses of this host that another host should try; IPv4 first.

    ALLRANKS_IFACE restricts them. It lists names of interfaces or networks in CIDR notation, separated by commas.

    Raises:
        ConfigError: ALLRANKS_IFACE matches no interface of this host.
    """
    found = _interfaces()
    wanted = [part.strip() for part in environ.get("ALLRANKS_IFACE", "").split(",") if part.strip()]
    if not wanted:
        return tuple(str(i.address.ip) for i in found if not i.name.startswith(_INNER))
    chosen = tuple(str(i.address.ip) for part in wanted for i in found if _matches(i, part))
    if not chosen:
        here = ", ".join(f"{i.name} ({i.address})" for i in found) or "no network"
        raise ConfigError(
            f"ALLRANKS_IFACE={environ['ALLRANKS_IFACE']!r} (--iface) matches no interface of host"
            f" {socket.gethostname()},"
            f" which has {here}. Expected the name of an interface, or a network such as 10.0.0.0/16."
        )
    # An address can match several entries of the variable.
    return tuple(dict.fromkeys(chosen))


def machine(environ: Mapping[str, str] = os.environ) -> str:
    """Return the identity of this host: equal for two processes that share memory and unix sockets.

    Two such processes have one kernel and one network namespace. Copies of one virtual machine may show the same boot
    id, but their addresses differ.

    A process that an agent of allranks has started returns the identity that the agent fixed (`fixed_machine`). A rank
    that starts after an address has appeared or disappeared therefore still shares memory with the ranks of its host.

    Args:
        environ: The environment of this process.
    """
    # The variable is inherited by every descendant and may be exported to other hosts (srun --export, mpirun -x). It is
    # valid only if the agent runs on this kernel and in this network namespace. The agent's pid and start time also
    # distinguish copies of one virtual machine, whose boot ids and namespaces are equal.
    pid, start, kernel, fixed = (environ.get(MACHINE, "").split(":") + [""] * 4)[:4]
    if fixed and kernel == _kernel() and start == _start_time(pid):
        return fixed
    addresses = sorted(str(i.address) for i in _interfaces() if i.address.version == 4)
    return _digest(f"{_kernel()} {addresses}")


def fixed_machine() -> str:
    """Return the value of ALLRANKS_MACHINE for the ranks that this agent starts. It is constant for this process.

    An agent that is itself a descendant of a rank keeps the identity of that rank: the rank may be the master of the
    workers that the agent starts.
    """
    # The pid is the key of the cache, so that a forked agent does not return the value of its parent.
    return _fixed_machine(os.getpid())


@functools.cache
def _fixed_machine(pid: int) -> str:
    return f"{pid}:{_start_time(str(pid))}:{_kernel()}:{machine()}"


def _kernel() -> str:
    """Return a digest of the boot id and the network namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net")
    network = os.readlink(namespace) if namespace.is_symlink() else ""  # some sandboxes have none
    return _digest(f"{boot} {network}")


def _start_time(pid: str) -> str:
    """Return when a process started, in clock ticks since boot. "" if no such process is visible."""
    try:
        # The name of the program, in parentheses, may contain spaces. The start time is field 22.
        return Path(f"/proc/{int(pid)}/stat").read_text(errors="surrogateescape").rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return ""


def _digest(facts: str) -> str:
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def listen(
    addresses: Sequence[str], port: int, backlog: int, prepare: Callable[[socket.socket], None] | None = None
) -> list[socket.socket]:
    """Listen on one port of several addresses. An address that has just disappeared is skipped.

    Args:
        addresses: Addresses of this host.
        port: The port; 0 for a port that is free on all of them.
        backlog: Number of connections that may wait on each socket.
        prepare: Called with each socket before it is bound.

    Raises:
        OSError: The port is in use, or this host has none of the addresses.
    """
    for attempt in itertools.count(1):
        listeners: list[socket.socket] = []
        try:
            _bind(addresses, port, backlog, prepare, listeners)
            return listeners
        except BaseException as error:
            for listener in listeners:
                listener.close()
            # For port 0 the kernel chooses a port that is free on the first address, but perhaps not on the others.
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if not taken or port != 0 or attempt == _PORTS_TRIED:
                raise
    raise AssertionError


def _bind(
    addresses: Sequence[str],
    port: int,
    backlog: int,
    prepare: Callable[[socket.socket], None] | None,
    listeners: list[socket.socket],
) -> None:
    gone: OSError | None = None
    for address in addresses:
        listener = Socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listeners.append(listener)
        # A restarted server gets its port although connections of its predecessor are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if prepare is not None:
            prepare(listener)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            gone = error  # the interface is coming up or going down
            listeners.pop().close()
            continue
        listener.listen(backlog)
        port = listener.getsockname()[1]
    if gone is not None and not listeners:
        raise gone


def interface_of(address: str) -> str:
    """Return the name of this host's interface that has the address. "" if none has."""
    return next((i.name for i in _interfaces() if str(i.address.ip) == address), "")


def nearest_first(addresses: tuple[str, ...]) -> list[str]:
    """Sort another host's addresses: addresses in a network of this host come first."""
    networks = [i.address.network for i in _interfaces()]

    def is_far(address: str) -> bool:
        ip = ipaddress.ip_address(address)
        return not any(ip.version == network.version and ip in network for network in networks)

    # A stable sort: within both classes, the order of the publishing host (IPv4 first) remains.
    return sorted(addresses, key=is_far)


def _matches(interface: _Interface, wanted: str) -> bool:
    if "/" not in wanted:
        return interface.name == wanted or str(interface.address.ip) == wanted
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError as error:
        raise ConfigError(f"ALLRANKS_IFACE={wanted!r} is not a network ({error}). Expected e.g. 10.0.0.0/16.") from None
    return network.version == interface.address.version and interface.address.ip in network


def _interfaces() -> list[_Interface]:
    """Return the interfaces that are up, without loopback."""
    found: list[_Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                (flags,) = struct.unpack_from("H", _ask(probe, _SIOCGIFFLAGS, name))
                if not flags & _UP or flags & _LOOPBACK:
                    continue
                # The answer is a sockaddr_in: family and port take 4 bytes, then the address follows.
                address = socket.inet_ntoa(_ask(probe, _SIOCGIFADDR, name)[4:8])
                mask = socket.inet_ntoa(_ask(probe, _SIOCGIFNETMASK, name)[4:8])
            except OSError:
                continue  # it has no IPv4 address, or has just disappeared
            found.append(_Interface(name, ipaddress.IPv4Interface(f"{address}/{mask}")))
    try:
        table = Path("/proc/net/if_inet6").read_text()
    except (FileNotFoundError, PermissionError):  # the kernel has no IPv6, or a sandbox hides the file
        table = ""
    for line in table.splitlines():
        digits, _, prefix, scope, _, name = line.split()
        if int(scope, 16) == 0:  # global
            address6 = ipaddress.IPv6Address(int(digits, 16))
            found.append(_Interface(name, ipaddress.IPv6Interface((address6, int(prefix, 16)))))
    return found


def _ask(probe: socket.socket, request: int, name: str) -> bytes:
    """Return the kernel's answer about an interface: the bytes after its name."""
    return fcntl.ioctl(probe, request, _IFREQ.pack(name.encode(), b""))[16:]
