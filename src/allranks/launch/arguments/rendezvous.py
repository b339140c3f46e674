"""The rendezvous of hosts that run the same command, in torchrun's words: ``--rdzv-*`` and ``--master-*``.

torchrun has two ways, which are one here: host 0 listens, and the other hosts connect to it. Under ``static``, hosts
have numbers (``--node-rank``). Under ``c10d``, the host that the endpoint names is host 0, and the others are numbered
in the order in which they connect. ``allranks run`` and ``allranks torchrun`` share these options.

Source: torch.distributed.run and torch.distributed.elastic.rendezvous of torch 2.13 for the names and their meaning.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from allranks._base.errors import ConfigError
from allranks._cluster.env import split_host_port

__all__ = ["C10D_PORT", "RendezvousOptions", "add_rendezvous", "read_rendezvous"]

C10D_PORT = 29400
"""The rendezvous port under c10d if the endpoint has no port."""

_T = TypeVar("_T")
_WORDS = {"1": True, "true": True, "t": True, "yes": True, "y": True} | dict.fromkeys(
    ("0", "false", "f", "no", "n"), False
)
# Settings of c10d's components that are always fulfilled here, or that have no counterpart here.
_IDLE = (
    "rank",
    "read_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "use_libuv",
)


@dataclass(frozen=True)
class RendezvousOptions:
    """Parameters of the rendezvous.

    Attributes:
        leader: host and port of host 0; None if it is not given. A port of None is the default port, 0 is any port.
        leads: this host is host 0, or is not; None to compare with the leader's name.
        run: name of the job, which must be the same on all hosts; "" for none.
        join_timeout_s: seconds to wait for hosts; None for the default.
        last_call_s: seconds to wait for more hosts after enough hosts have joined; None for the default.
        own: addresses of this host for other hosts, separated by commas; "" for all.
    """

    leader: tuple[str, int | None] | None = None
    leads: bool | None = None
    run: str = ""
    join_timeout_s: float | None = None
    last_call_s: float | None = None
    own: str = ""


def add_rendezvous(add: Callable[..., Any]) -> None:
    """Add the options. The help hides duplicate spellings: ``--master-addr`` and ``--rdzv-endpoint`` mean the same."""
    for words, dest, kind, metavar, shown in (
        ("master addr", "master_addr", str, "HOST[:PORT]", "address of host 0, if you start the command on each host"),
        ("master port", "master_port", _port, "PORT", ""),
        ("rdzv endpoint", "rdzv_endpoint", str, "HOST[:PORT]", "like --master-addr, but hosts need no --node-rank"),
        ("rdzv backend", "rdzv_backend", _backend, "NAME", ""),
        ("rdzv id", "rdzv_id", str, "NAME", "name of the job, the same on all hosts"),
        ("rdzv conf", "rdzv_conf", str, "KEY=VALUE,...", ""),
        ("local addr", "local_addr", str, "HOST", ""),
    ):
        for mark in "-_":
            hint = shown if shown and mark == "-" else argparse.SUPPRESS
            add("--" + words.replace(" ", mark), dest=dest, type=kind, metavar=metavar, help=hint)


def read_rendezvous(args: argparse.Namespace) -> RendezvousOptions:
    """Read the options of ``add_rendezvous``.

    Raises:
        ConfigError: they contradict each other, or are impossible.
    """
    settings = _split(args.rdzv_conf or "")
    if (kind := settings.pop("store_type", "tcp")) != "tcp":
        raise ConfigError(
            f"--rdzv-conf store_type={kind}: the rendezvous supports TCP only.\n  Use --rdzv-endpoint HOST:PORT."
        )
    leads = _take(settings, "is_host", "yes or no", lambda text: _WORDS[text.lower()])
    # c10d's name is join_timeout, static's is timeout; join_timeout takes precedence below.
    join = [_take(settings, name, "a number of seconds", _seconds) for name in ("join_timeout", "timeout")]
    last_call = _take(settings, "last_call_timeout", "a number of seconds", _seconds)
    if unknown := [name for name in settings if name not in _IDLE]:
        known = ", ".join(("is_host", "join_timeout", "timeout", "last_call_timeout", "store_type", *_IDLE))
        raise ConfigError(f"--rdzv-conf: unknown setting {unknown[0]!r}; known settings: {known}")
    return RendezvousOptions(
        _leader(args),
        leads,
        args.rdzv_id or "",
        join_timeout_s=join[1] if join[0] is None else join[0],
        last_call_s=last_call,
        own=_addresses(args.local_addr) if args.local_addr else "",
    )


def _leader(args: argparse.Namespace) -> tuple[str, int | None] | None:
    port: int | None = args.master_port
    if args.rdzv_endpoint:
        if args.master_addr is not None or port is not None:
            raise ConfigError(
                "--rdzv-endpoint and --master-addr or --master-port are equivalent.\n  Specify only one of them."
            )
        host, inner = _host_port(args.rdzv_endpoint, "--rdzv-endpoint")
        return host, C10D_PORT if inner is None and args.rdzv_backend == "c10d" else inner
    if args.master_addr is None:
        return None if port is None else ("", port)
    host, inner = _host_port(args.master_addr, "--master-addr")
    if inner is not None and port not in (None, inner):
        raise ConfigError(
            f"--master-addr {args.master_addr} and --master-port {port} specify two different ports.\n"
            "  Remove one of them."
        )
    return host, port if inner is None else inner


def _host_port(text: str, source: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if colon and port == "0" and (":" not in host or host.startswith("[")):
        return host.removeprefix("[").removesuffix("]"), 0
    return split_host_port(text, source)


def _split(text: str) -> dict[str, str]:
    settings = {}
    for part in filter(None, text.strip().split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or not value:
            raise ConfigError(f"--rdzv-conf {text!r}: expected KEY=VALUE,KEY=VALUE,...")
        settings[name] = value
    return settings


def _take(settings: dict[str, str], name: str, expected: str, read: Callable[[str], _T]) -> _T | None:
    if name not in settings:
        return None
    text = settings.pop(name)
    try:
        return read(text)
    except (ValueError, KeyError):
        raise ConfigError(f"--rdzv-conf {name}={text}: expected {expected}") from None


def _seconds(text: str) -> float:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return float(text)


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port (0..65535)")


def _backend(text: str) -> str:
    if text in ("c10d", "static"):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not supported; the rendezvous runs on one of the hosts.\n"
        "  Use --rdzv-backend c10d --rdzv-endpoint HOST:PORT."
    )


def _addresses(name: str) -> str:
    """Return the addresses of a name without loopback, the usual address of a host's own name; "" for any."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise ConfigError(
            f"--local-addr {name!r} is not an address, and the name does not resolve.\n"
            "  Pass an IP address of this host."
        ) from None
    return ",".join(address for address in found if not ipaddress.ip_address(address).is_loopback)
