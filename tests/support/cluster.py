"""Hosts on one machine: each has its own network, host name, boot id and /etc/hosts; a switch connects them.

A host is a process that holds its namespaces, which disappear when it exits. The process exits with the test, even if
the test is killed. On every host its own name resolves to 127.0.1.1, as on a stock Debian.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter")
_NETWORK, _NETWORK6 = "10.77.0", "fd77"
_HOLD = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch" /etc/nsswitch.conf
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
hostname "$2"
ip link set lo up
echo ready
read -r nothing
"""
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}


def trouble() -> str:
    """Return the reason why this machine cannot create hosts, or ""."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"without {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def await_true(condition: Callable[[], bool], what: str, log: Path, patience_s: float = 30.0) -> None:
    """Wait until a condition on a daemon holds.

    Raises:
        AssertionError: the condition did not hold within ``patience_s`` seconds; contains the end of the log.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not {what} within {patience_s} s: {log.read_text()[-2000:]}"
        time.sleep(0.05)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    holder: int
    """The pid of the process that owns the host's namespaces."""
    names: Path
    """The /etc/hosts file of the host."""

    def enter(self) -> None:
        """Move this process into the namespaces of the host. The process must have a single thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind, flag in _NAMESPACES.items():
            with open(f"/proc/{self.holder}/ns/{kind}") as namespace:
                if libc.setns(namespace.fileno(), flag) != 0:
                    raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        # Otherwise torch's gloo binds to the address of the host's own name, which is a loopback address.
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def set_up(self, *command: str) -> None:
        """Run an ``ip`` command on the host."""
        _inside(self.holder, "ip", *command)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program on the host."""
        return subprocess.Popen(
            self.inside(*command), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs a program on the host."""
        return ["nsenter", "--target", str(self.holder), "--net", "--uts", "--mount", "--", *command]

    @contextlib.contextmanager
    def serve(self, log: Path, *command: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
        """Run a daemon on the host until the block exits or this process exits. It must stay in the foreground."""
        daemon = ["setpriv", "--pdeathsig", "TERM", "--", *command]
        with log.open("a") as file:
            process = subprocess.Popen(
                self.inside(*daemon), env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Cluster:
    """``hosts``, and the switch that connects them."""

    def __init__(self, hosts: list[Host], switch: int) -> None:
        self.hosts = hosts
        self._switch = switch

    def wire(self, host: int, name: str, address: str) -> None:
        """Add an interface on the switch to a host."""
        holder = self.hosts[host].holder
        port = f"{name}port{host}"
        _inside(self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", str(holder))
        _inside(self._switch, "ip", "link", "set", port, "master", "bridge", "up")
        self.hosts[host].set_up("address", "add", address, "dev", name)
        self.hosts[host].set_up("link", "set", name, "up")

    def cut(self, host: int) -> None:
        """Disconnect a host: packets are dropped without an error."""
        _inside(self._switch, "ip", "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Reconnect a host, and wait until all hosts reach it.

        Neighbor tables are flushed first, because a host delays the next lookup of an unreachable neighbor.
        """
        _inside(self._switch, "ip", "link", "set", f"port{host}", "up")
        for each in self.hosts:
            each.set_up("neighbour", "flush", "all")
        for each in self.hosts:
            _await_route(each, self.hosts[host].address)


def _await_route(host: Host, address: str) -> None:
    """Wait until a closed port refuses a connection, which proves that packets travel in both directions."""
    ask = f"import socket; socket.create_connection(({address!r}, 9), 1)"
    for _ in range(10):
        done = subprocess.run(host.inside(sys.executable, "-S", "-c", ask), capture_output=True, text=True, check=False)
        if "refused" in done.stderr:
            return
    raise AssertionError(f"cannot connect to {address}: {done.stderr}")


@contextlib.contextmanager
def cluster(size: int, ipv6: bool = False) -> Iterator[Cluster]:
    """Create ``size`` hosts (node0, node1, ...) with IPv4 addresses, or with IPv6 addresses if ``ipv6`` is true."""
    with tempfile.TemporaryDirectory(prefix="allranks-hosts-") as folder, contextlib.ExitStack() as stack:
        names = [f"node{i}" for i in range(size)]
        addresses = [f"{_NETWORK6}::{i + 1}" if ipv6 else f"{_NETWORK}.{i + 1}" for i in range(size)]
        switch = _hold(stack, Path(folder) / "switch", "switch", "127.0.0.1 localhost\n")
        _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(switch, "ip", "link", "set", "bridge", "up")
        hosts = []
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            known = "127.0.0.1 localhost\n" + "".join(
                f"{'127.0.1.1' if other == name else where} {other}\n"
                for other, where in zip(names, addresses, strict=True)
            )
            holder = _hold(stack, Path(folder) / name, name, known)
            plug = ("type", "veth", "peer", "name", "eth0", "netns", str(holder))
            _inside(switch, "ip", "link", "add", f"port{i}", *plug)
            _inside(switch, "ip", "link", "set", f"port{i}", "master", "bridge", "up")
            plain = (f"{address}/64", "dev", "eth0", "nodad") if ipv6 else (f"{address}/24", "dev", "eth0")
            _inside(holder, "ip", "address", "add", *plain)
            _inside(holder, "ip", "link", "set", "eth0", "up")
            hosts.append(Host(name, address, holder, Path(folder) / name / "hosts"))
        yield Cluster(hosts, switch)


def _hold(stack: contextlib.ExitStack, folder: Path, name: str, known: str) -> int:
    """Start a process in new namespaces. It exits when its stdin is closed, and therefore with this process."""
    folder.mkdir()
    (folder / "hosts").write_text(known)
    (folder / "nsswitch").write_text("hosts: files\n")
    (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", _HOLD, "sh", str(folder), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    assert process.stdout.readline() == "ready\n"
    return process.pid


def _inside(holder: int, *command: str) -> None:
    subprocess.run(["nsenter", "--target", str(holder), "--net", "--", *command], check=True)
