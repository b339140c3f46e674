"""A worker's side of the meeting: it finds the master, connects, and serves until the master ends the connection.

A worker ends when its connection does: by itself where it receives, else by a thread that watches the connection.
"""

from __future__ import annotations

import atexit
import importlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from allranks._base.errors import ConfigError, JoinError, StoreLostError
from allranks._base.threads import Daemon
from allranks._cluster.env import read_int
from allranks._cluster.network import machine, nearest_first
from allranks._net.listener import dial
from allranks._rendezvous import rendezvous
from allranks._rendezvous.rendezvous import Member, this_member
from allranks._store import Store, StoreClient
from allranks.launch.spec.target import MASTER
from allranks.remote.bootstrap.endpoint import (
    TIMEOUT_S,
    MasterEndpoint,
    Welcome,
    WorkerHello,
    WorkerReady,
    is_closed,
    receive_message,
    send_message,
)
from allranks.remote.bootstrap.group_registry import GroupRegistry

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["WorkerContext", "connect_to_master", "join_master", "serve_here"]

_PATIENCE_S = 1e6  # the master's script may take long before it calls; a worker ends with its launcher
_GRACE_S = 1.0  # from the end of its connection to that of a worker that does not notice


class WorkerContext:
    """A worker's place: its connection with the master, and the groups that it is in.

    Attributes:
        rank: this worker, 1 to n.
        socket: the connection with the master, a stream.
        device: where it keeps its tensors.
    """

    def __init__(self, rank: int, sock: socket.socket, device: str, serve: str, groups: GroupRegistry) -> None:
        self.rank = rank
        self.socket = sock
        self.device = device
        self._serve = serve
        self._groups = groups
        Daemon(target=_end_with, args=(sock,), name="allranks-connection").start()
        self.leave = groups.close
        atexit.register(self.leave)

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Makes a group together with its other members; see ``GroupRegistry.make_group``."""
        return self._groups.make_group(name, ranks, timeout_s)

    def serve(self) -> NoReturn:
        """Runs the worker's program, and then ends this process."""
        module, _, name = self._serve.partition(":")
        program: Callable[[WorkerContext], None] = getattr(importlib.import_module(module), name)
        try:
            program(self)
        except Exception:
            if not is_closed(self.socket):
                raise
        raise SystemExit(0)


def connect_to_master(timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> WorkerContext:
    """Connects to the master, as a worker that runs no program of the user's.

    Args:
        timeout_s: how long to wait for it.
        environ: says where it is, or which rank of a job this process is.

    Raises:
        ConfigError: it cannot be found.
        JoinError: it did not come in time.
    """
    if packed := environ.get(MASTER):
        rank, local_rank = read_int(environ, "RANK", 1), read_int(environ, "LOCAL_RANK", 0)
        if rank is None:
            raise ConfigError(f"{MASTER} is set, and RANK is not: this is no worker that allranks has started")
        endpoint = msgspec.json.decode(packed, type=MasterEndpoint)
        return _connect(endpoint, this_member(rank, endpoint.size), local_rank or 0, timeout_s)
    meeting = rendezvous.join("env://", timeout_s=timeout_s, environ=environ)
    try:
        return join_master(meeting, timeout_s)
    finally:
        meeting.close()


def join_master(meeting: rendezvous.JobMeeting, timeout_s: float) -> WorkerContext:
    endpoint = msgspec.json.decode(meeting.store.get("master", timeout_s), type=MasterEndpoint)
    return _connect(endpoint, meeting.members[meeting.rank], meeting.local_rank, timeout_s)


def _connect(endpoint: MasterEndpoint, me: Member, local_rank: int, timeout_s: float) -> WorkerContext:
    timeout_s = min(timeout_s, TIMEOUT_S)  # it is there, or it is gone
    secret, until = endpoint.secret(), time.monotonic() + timeout_s
    near = endpoint.machine == machine()
    groups = GroupRegistry(_connect_store(endpoint, near, secret, timeout_s), me)
    groups.enter()
    hosts = nearest_first(endpoint.addresses)
    sock = dial(
        [(f"@{endpoint.listener}", 0)] if near else [(host, endpoint.port) for host in hosts],
        secret,
        until,
        peer="master",
    )
    try:
        send_message(sock, WorkerHello(me))
        welcome = receive_message(sock, Welcome, until)
        device, trouble = _choose_device(welcome.device, local_rank)
        send_message(sock, WorkerReady(trouble))
    except OSError as error:
        raise SystemExit(0) from error  # the master has ended, and says why
    if trouble:
        raise SystemExit(0)  # the master says so
    sock.settimeout(None)
    return WorkerContext(me.rank, sock, device, welcome.serve, groups)


def _connect_store(endpoint: MasterEndpoint, near: bool, secret: bytes, timeout_s: float) -> Store:
    if near:
        return StoreClient.connect(endpoint.store, secret, timeout_s)
    tried = []
    for store in endpoint.stores:
        try:
            return StoreClient.connect(store, secret, min(timeout_s, 5.0), retry=False)
        except (ConfigError, JoinError, StoreLostError, OSError) as error:
            tried.append(f"{store}: {str(error).partition(chr(10))[0]}")
    raise ConfigError(
        f"{socket.gethostname()} cannot reach the master at {'; '.join(tried) or 'any address'}.\n"
        "  A firewall between the hosts must let workers connect; ALLRANKS_IFACE names the interface to use."
    )


def _choose_device(wanted: str, local_rank: int) -> tuple[str, str]:
    """The device that is meant by a name, and why it cannot be used; "" if it can."""
    import torch

    try:
        device = torch.device(wanted)
        if device.type == "meta":
            raise ValueError("it holds no data")
        if device.type != "cpu" and device.index is None:
            count = torch.get_device_module(device.type).device_count()
            device = torch.device(device.type, local_rank % max(1, count))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        return "", f"worker_device={wanted!r} cannot be used there: {str(error).partition(chr(10))[0]}"
    return str(device), ""


def serve_here() -> NoReturn:
    """What a process does that was started as a worker."""
    try:
        context = connect_to_master(_PATIENCE_S)
    except (ConfigError, JoinError) as error:
        print(f"allranks: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.environ.pop(MASTER, None)  # what the worker starts is none
    try:
        context.serve()
    except SystemExit as error:  # a function of the user's may raise it, too
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        context.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)  # taking torch apart takes 0.2 s
    raise AssertionError


def _end_with(sock: socket.socket) -> None:
    """Ends this process when the master is gone, where the worker's program does not."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    os._exit(0)
