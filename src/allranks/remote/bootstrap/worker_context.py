"""The worker's side of the start: it finds the master, connects, and serves until the master closes the connection.

A worker terminates when its connection is closed. A worker that is receiving detects this itself. Otherwise a thread
that watches the connection ends the process.
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

_PATIENCE_S = 1e6  # the master's script may run for long before it calls; a worker ends with its launcher
_GRACE_S = 1.0  # seconds between the end of the connection and the exit of a worker that has not detected it


class WorkerContext:
    """The connection of a worker with the master, and the groups that it has joined.

    Attributes:
        rank: The rank of this worker, 1 to n.
        socket: The connection with the master, a stream.
        device: The device of its tensors.
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
        """Create a group together with its other members. See ``GroupRegistry.make_group``."""
        return self._groups.make_group(name, ranks, timeout_s)

    def serve(self) -> NoReturn:
        """Run the worker's program, and then exit this process."""
        module, _, name = self._serve.partition(":")
        program: Callable[[WorkerContext], None] = getattr(importlib.import_module(module), name)
        try:
            program(self)
        except Exception:
            # When the master terminates, running operations may fail. These errors are not the worker's own.
            if not is_closed(self.socket):
                raise
        raise SystemExit(0)


def connect_to_master(timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> WorkerContext:
    """Connect to the master, as a worker that does not run a user program.

    Args:
        timeout_s: Time limit for the connection, in seconds.
        environ: The variables that contain the master's address, or the rank of this process in a job.

    Raises:
        ConfigError: The master cannot be found.
        JoinError: The master did not connect in time.
    """
    if packed := environ.get(MASTER):
        rank, local_rank = read_int(environ, "RANK", 1), read_int(environ, "LOCAL_RANK", 0)
        if rank is None:
            raise ConfigError(
                f"{MASTER} is set, but RANK is not: allranks did not start this process as a worker.\n  Unset {MASTER}."
            )
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
    # The endpoint is known, so the master has already started; a longer wait cannot succeed.
    timeout_s = min(timeout_s, TIMEOUT_S)
    secret, until = endpoint.secret(), time.monotonic() + timeout_s
    near = endpoint.machine == machine()
    groups = GroupRegistry(_connect_store(endpoint, near, secret, timeout_s), me)
    # Before the master admits this worker, so that no group uses the record of a previous process of its rank.
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
        raise SystemExit(0) from error  # the master has terminated, and reports the reason
    if trouble:
        raise SystemExit(0)  # the master raises this error
    sock.settimeout(None)
    return WorkerContext(me.rank, sock, device, welcome.serve, groups)


def _connect_store(endpoint: MasterEndpoint, near: bool, secret: bytes, timeout_s: float) -> Store:
    if near:
        return StoreClient.connect(endpoint.store, secret, timeout_s)
    tried = []
    for store in endpoint.stores:
        try:
            # At most 5 s for each address, so that an address behind a firewall leaves time for the next one.
            return StoreClient.connect(store, secret, min(timeout_s, 5.0), retry=False)
        except (ConfigError, JoinError, StoreLostError, OSError) as error:
            tried.append(f"{store}: {str(error).partition(chr(10))[0]}")
    raise ConfigError(
        f"{socket.gethostname()} cannot reach the master at {'; '.join(tried) or 'any address'}.\n"
        "  Check that no firewall between the hosts blocks workers, or set ALLRANKS_IFACE to the interface to use."
    )


def _choose_device(wanted: str, local_rank: int) -> tuple[str, str]:
    """Return the device for a name, and the reason why it cannot be used, or ""."""
    import torch

    try:
        device = torch.device(wanted)
        if device.type == "meta":
            raise ValueError("a meta tensor stores no data")
        if device.type != "cpu" and device.index is None:
            count = torch.get_device_module(device.type).device_count()
            device = torch.device(device.type, local_rank % max(1, count))
        torch.empty(1, device=device)  # an unusable device fails here, and not in the first operation
    # AssertionError: torch raises it if it was compiled without CUDA.
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        return "", f"worker_device={wanted!r} cannot be used by this worker: {reason}.\n  Pass another worker_device=."
    return str(device), ""


def serve_here() -> NoReturn:
    """Run the process of a worker. It connects to the master and serves it."""
    try:
        context = connect_to_master(_PATIENCE_S)
    except (ConfigError, JoinError) as error:
        print(f"allranks: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.environ.pop(MASTER, None)  # processes that the worker starts are not workers
    try:
        context.serve()
    except SystemExit as error:  # a user function may raise it, too
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        context.leave()  # `_exit` does not call the functions of atexit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)  # the regular shutdown of torch takes 0.2 s
    raise AssertionError


def _end_with(sock: socket.socket) -> None:
    """Exit this process when the master has terminated, even if the worker's program does not return."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    os._exit(0)
