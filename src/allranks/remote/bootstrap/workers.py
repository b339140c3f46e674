"""The master's side of the start: it gathers the workers, watches them and terminates them.

Either all processes are started as the ranks of a job, and meet like ranks (``_rendezvous``). Or the master starts the
workers itself (`worker_pool`) and passes its address to them. In both cases the master then serves a store, in which
groups are created (`group_registry`), and listens for workers. Each worker connects once, and commands travel on that
connection. A worker proves that it has a token of this job. On one host all connections are unix sockets.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import ConfigError, JoinError, TimeoutError, UsageError, rank_list
from allranks._base.forks import forks
from allranks._base.threads import Daemon
from allranks._cluster.env import read_env
from allranks._cluster.hostlist import Slots, parse_hosts
from allranks._cluster.network import published_addresses
from allranks._net.listener import Listener
from allranks._net.secret import load_secret, store_secret
from allranks._rendezvous import rendezvous
from allranks._rendezvous.rendezvous import Member, this_member
from allranks._store import StoreClient, StoreServer
from allranks.launch.jobs.multi_host import is_this_host
from allranks.launch.ranks.rank import this_rank
from allranks.launch.spec.events import RestartRank
from allranks.launch.spec.messages import Ended
from allranks.launch.spec.target import MASTER
from allranks.remote.bootstrap.endpoint import (
    TIMEOUT_S,
    MasterEndpoint,
    Welcome,
    WorkerConnection,
    WorkerHello,
    WorkerReady,
    close_connection,
    receive_message,
    send_message,
)
from allranks.remote.bootstrap.group_registry import GroupRegistry
from allranks.remote.bootstrap.worker_context import join_master
from allranks.remote.bootstrap.worker_pool import WorkerPool, describe_end, read_status

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Workers", "gather_workers"]

SERVE = "allranks.remote.worker.interpreter:serve"

_RESPAWN_S = 60.0  # default time limit, in seconds, for the start of a replacement
_LOOK_S = 0.1  # seconds of one wait for a connection
_HELLO_S = 10.0  # time limit, in seconds, for the first message of a connected worker
_KNOWN_S = 1.0  # seconds to wait, after a connection has ended, for the exit status of its process


class Workers:
    """The workers of a master.

    Attributes:
        connections: The connections with the workers, by rank from 1 on.
        on_lost: Called with a worker's rank, in another thread, when the worker is lost.
    """

    def __init__(
        self,
        server: MasterServer,
        connections: list[WorkerConnection],
        pool: WorkerPool | None,
        welcome: Welcome,
        launcher_store: StoreClient | None = None,
    ) -> None:
        self.connections = connections
        self._welcome = welcome
        self._new: deque[WorkerConnection] = deque()  # connections that the watcher must still register
        self.on_lost: Callable[[int], None] | None = None
        self._server = server
        self._pool = pool
        # The launcher's store, in which the launcher publishes exit statuses of workers on all hosts.
        self._launcher_store = launcher_store
        self._forks = forks()
        self._lost: set[int] = set()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._watcher = Daemon(target=self._watch, name="allranks-connections")
        self._watcher.start()
        atexit.register(self.close)

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Create a group together with its other members. See ``GroupRegistry.make_group``."""
        return self._server.groups.make_group(name, ranks, timeout_s)

    def how_ended(self, rank: int) -> str:
        """Return how a worker's process ended: ``exit code 3``, ``killed by signal 9 (SIGKILL)``, or ""."""
        connection = self.connections[rank - 1]
        # The process is on another host, and no launcher publishes its exit status.
        if self._pool is None and self._launcher_store is None and connection.socket.family != socket.AF_UNIX:
            return ""
        until = time.monotonic() + _KNOWN_S
        # The connection closes before the exit status is available.
        while (status := self._status(connection)) is None and time.monotonic() < until:
            time.sleep(_LOOK_S / 10)
        return "" if status is None else describe_end(status)

    def _status(self, connection: WorkerConnection) -> int | str | None:
        if self._pool is not None:
            return self._pool.ended.get(connection.rank)
        if self._launcher_store is None:
            return read_status(connection.pid)
        packed = self._launcher_store.peek([Ended.key(connection.rank)])[0]
        ended = msgspec.json.decode(packed, type=Ended) if packed is not None else None
        # The record may be of a previous process of this rank.
        return ended.status if ended is not None and ended.pid in (0, connection.pid) else None

    def respawn(self, rank: int, timeout_s: float = _RESPAWN_S) -> WorkerConnection:
        """Start a new worker in place of another one, which is killed if it is still running.

        Args:
            rank: The rank of the worker.
            timeout_s: Time limit, in seconds.

        Returns:
            The connection with the new worker, which also replaces the old one in ``connections``.

        Raises:
            UsageError: The worker does not exist, or no launcher is available to start another one.
            ConfigError: The new worker exited during its start.
            TimeoutError: The new worker did not connect in time.

        Cost:
            0.03 s, because it is forked from a process that has imported torch. An import of torch with ``--start
            spawn``.
        """
        if not isinstance(rank, int) or not 1 <= rank <= len(self.connections):
            raise UsageError(f"respawn: rank {rank!r} is not a worker; expected 1 to {len(self.connections)}")
        launched = this_rank()
        if self._pool is None and (launched is None or launched.target.mode != "master"):
            raise UsageError(
                f"respawn: rank {rank} cannot be restarted: neither this process (workers=, hosts=) nor"
                " allranks run --mode master has started it, and no other launcher is available.\n  Restart the job."
            )
        until = time.monotonic() + timeout_s
        old = self.connections[rank - 1]
        # The watcher must record the loss before the new worker is admitted. A later record would fail its groups.
        with contextlib.suppress(OSError):  # the connection is already closed
            # Not `close`, because the watcher still polls the descriptor.
            old.socket.shutdown(socket.SHUT_RDWR)
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._lost, timeout_s):
                raise TimeoutError(
                    f"respawn: the termination of {old} was not detected within {timeout_s:.1f} s.\n"
                    "  Report it with the output of `allranks doctor`."
                )
        old.socket.close()
        self._server.groups.admit(rank)
        try:
            if self._pool is not None:
                self._pool.respawn(rank, until)
            else:
                assert launched is not None
                launched.request_restart(
                    RestartRank(rank, {MASTER: msgspec.json.encode(self._server.endpoint).decode()})
                )
            connection = self._server.gather([rank], until, self._welcome, self._pool)[0]
        except BaseException:
            # `admit` has removed the record of the loss. Groups with this rank must fail, and not wait for it.
            self._server.groups.lose(rank, f"{old} has terminated, and no replacement has connected")
            raise
        self.connections[rank - 1] = connection
        self._lost.discard(rank)
        self._new.append(connection)
        # Only after the connection is in `_new`, which the watcher reads when it wakes up.
        os.eventfd_write(self._wake, 1)
        return connection

    def close(self) -> None:
        """Close the workers' connections, wait briefly, and kill workers that this process started. Idempotent."""
        global _workers
        if self._closed or self._forks != forks():
            return
        # Before the watcher is woken up, because it then checks this flag.
        self._closed = True
        if _workers is self:
            _workers = None
        atexit.unregister(self.close)  # atexit would keep this object alive
        os.eventfd_write(self._wake, 1)
        # The watcher stops first, because it would report the connections that are closed below as lost workers.
        self._watcher.join()
        os.close(self._wake)  # after the watcher has terminated, which polls it
        for connection in self.connections:
            close_connection(connection.socket)
        # After the connections are closed, so that the pool only kills workers that do not exit by themselves.
        if self._pool is not None:
            self._pool.close()
        if self._launcher_store is not None:
            self._launcher_store.close()
        self._server.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        watched: dict[int, WorkerConnection] = {}
        self._new.extend(self.connections)
        while not self._closed:
            while self._new:
                connection = self._new.popleft()
                watched[connection.socket.fileno()] = connection
                poll.register(connection.socket, select.POLLRDHUP)  # only the end: other threads read the answers
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    poll.unregister(fd)
                    self._lose(watched.pop(fd))

    def _lose(self, connection: WorkerConnection) -> None:
        # Before `respawn` is notified: it removes this record again when it admits the replacement.
        self._server.groups.lose(connection.rank, f"{connection} is lost")
        with self._changed:
            self._lost.add(connection.rank)
            self._changed.notify_all()
        if self.on_lost is not None:
            self.on_lost(connection.rank)


_workers: Workers | None = None


def gather_workers(
    init_method: str | None = None,
    *,
    workers: int | None = None,
    hosts: str | Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    worker_device: str = "cpu",
    threads: int | None = None,
    world_size: int = -1,
    rank: int = -1,
    serve: str = SERVE,
) -> Workers:
    """Gather the workers. In a worker, serve the master and do not return.

    Args:
        init_method: How master and workers find each other if all have been started, see ``init_process_group``.
        workers: The number of workers to start on this host.
        hosts: The hosts on which to start workers by ssh: ``"node1:2,node2"`` or ``["node1:2", "node2"]``.
        timeout_s: Time limit for the workers to connect, in seconds.
        worker_device: The device of their tensors. If a host has several devices of this type, each worker uses another
            one.
        threads: The threads of each worker that is started. None: a fair share of the CPUs.
        world_size: The number of processes, if no process is started. -1: from the environment.
        rank: The rank of this process. -1: from the environment.
        serve: The worker's program, ``module:function``. It is called with the worker's ``WorkerContext``.

    Raises:
        UsageError: The arguments contradict each other, or this process already has workers.
        ConfigError: A worker cannot be started. The message names the place and the reason.
        JoinError: Some workers did not connect in time.
        SystemExit: This is a worker, and the master has terminated.

    Cost:
        One import of torch, in parallel on all hosts, and about 30 ms for each worker.
    """
    global _workers
    _check(init_method, workers, hosts, timeout_s, worker_device, threads, world_size, rank)
    if workers is None and hosts is None:
        made = _gather_ranks(init_method, world_size, rank, timeout_s, worker_device, serve)
    else:
        here = [Slots(socket.gethostname(), workers)]
        used = here if hosts is None else parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts), "hosts")
        made = _start_workers(used, timeout_s, worker_device, threads, serve)
    _workers = made
    return made


def _check(
    init_method: str | None,
    workers: int | None,
    hosts: str | Sequence[str] | None,
    timeout_s: float,
    worker_device: str,
    threads: int | None,
    world_size: int,
    rank: int,
) -> None:
    if _workers is not None:
        raise UsageError("init_master_worker: this process already has workers.\n  Close them first.")
    if sum(given is not None for given in (init_method, workers, hosts)) > 1:
        raise UsageError("init_master_worker: expected one of init_method, workers and hosts, not several")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise UsageError(f"init_master_worker: workers={workers!r}: expected the number of workers to start, 1 or more")
    names = [hosts] if isinstance(hosts, str) else () if hosts is None else hosts
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"init_master_worker: hosts={hosts!r}: expected 'node1:2,node2', or a list of these strings")
    if (workers is not None or hosts is not None) and (world_size, rank) != (-1, -1):
        raise UsageError(
            "init_master_worker: world_size= and rank= apply only to existing processes.\n"
            "  Omit them if workers= or hosts= starts the workers."
        )
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"init_master_worker: threads={threads!r}: expected 1 or more threads for each worker")
    if not timeout_s > 0:
        raise UsageError(f"init_master_worker: timeout must be positive, not {timeout_s!r}")
    if not isinstance(worker_device, str) or not worker_device:
        raise UsageError(f"init_master_worker: worker_device={worker_device!r}: expected a device, such as 'cpu'")
    if workers is None and hosts is None:
        if threads is not None:
            raise UsageError(
                "init_master_worker: threads= applies only to workers that this call starts.\n"
                "  Pass workers= or hosts= to start workers, or omit threads=."
            )
        return
    env = read_env()
    if env.world_size > 1:
        argument = "workers" if workers is not None else "hosts"
        raise UsageError(
            f"init_master_worker: this process is already rank {env.rank} of {env.world_size}, and {argument}= would"
            f" start workers for each rank.\n  Omit {argument}= to make rank 0 the master of the other ranks, or start"
            " this program without a launcher."
        )


def _gather_ranks(
    init_method: str | None, world_size: int, rank: int, timeout_s: float, device: str, serve: str
) -> Workers:
    meeting = rendezvous.join(init_method, rank=rank, world_size=world_size, timeout_s=timeout_s)
    try:
        if meeting.world_size == 1:
            raise ConfigError(
                "init_master_worker: the world has a single process, and a master needs at least one worker.\n"
                "  Start the program with allranks run --mode master -n 5 script.py, or start workers with"
                " init_master_worker(workers=4)."
            )
        if meeting.rank:
            context = join_master(meeting, timeout_s)
        else:
            far = len({member.machine for member in meeting.members}) > 1
            server = MasterServer(meeting.members[0], far, derived=far)
            try:
                # The server already listens, because workers connect as soon as they have read its endpoint.
                meeting.store.set("master", msgspec.json.encode(server.endpoint))
                welcome = Welcome(device, serve)
                connections = server.gather(range(1, meeting.world_size), time.monotonic() + timeout_s, welcome)
                return Workers(server, connections, None, welcome, _launchers_store() if far else None)
            except BaseException:
                server.close()
                raise
    finally:
        meeting.close()
    return context.serve()


def _launchers_store() -> StoreClient | None:
    """Return the store of ``allranks run --mode master``, or None if another program has started this process."""
    launched = this_rank()
    if launched is None or launched.target.mode != "master":
        return None
    return StoreClient.connect(os.environ["ALLRANKS_STORE"], load_secret(), TIMEOUT_S)


def _start_workers(hosts: Sequence[Slots], timeout_s: float, device: str, threads: int | None, serve: str) -> Workers:
    size = 1 + sum(1 if host.count is None else host.count for host in hosts)
    if size == 1:
        raise UsageError("init_master_worker: hosts= has no slot for a worker.\n  Add slots: hosts='node1:2'.")
    far = not all(is_this_host(host.name) for host in hosts)
    server = MasterServer(this_member(0, size), far)
    environ = {MASTER: msgspec.json.encode(server.endpoint).decode()}
    if far:
        environ["ALLRANKS_SECRET"] = load_secret().decode()  # groups that span hosts prove this secret
    pool = WorkerPool(hosts, environ, threads, timeout_s)
    try:
        pool.start()
        welcome = Welcome(device, serve)
        return Workers(
            server, server.gather(range(1, size), time.monotonic() + timeout_s, welcome, pool), pool, welcome
        )
    except BaseException:
        server.close()
        pool.close()
        raise


class MasterServer:
    """The servers of a master: a store for groups, and a listener.

    Args:
        me: The master.
        far: Some workers are on other hosts.
        derived: The token is derived from the job's secret, and is not sent.
    """

    def __init__(self, me: Member, far: bool, derived: bool = False) -> None:
        salt = secrets.token_hex(16)
        token = store_secret(load_secret(), salt) if derived else secrets.token_hex(32).encode()
        name = f"allranks-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as opened:  # closes what has been opened if a later step fails
            self._server = opened.enter_context(StoreServer.unix(token).start())
            stores = self._server.listen_to_other_hosts() if far else []
            addresses = published_addresses() if far else ()
            self._listener = Listener(addresses, 0, token, name)
            opened.callback(self._listener.close)
            self.groups = GroupRegistry(StoreClient.connect(self._server.address, token), me)
            opened.callback(self.groups.close)
            self.groups.enter()
            self._opened = opened.pop_all()
        self.endpoint = MasterEndpoint(
            *(me.machine, self._server.address, name, tuple(stores), addresses, self._listener.port, me.world_size),
            "" if derived else token.decode(),
            salt,
        )

    def gather(
        self, ranks: Sequence[int], until: float, welcome: Welcome, pool: WorkerPool | None = None
    ) -> list[WorkerConnection]:
        """Wait until the workers of these ranks are ready.

        Raises:
            ConfigError: A worker cannot work. The message contains the reason.
            JoinError: Some workers did not connect in time.
        """
        began = time.monotonic()
        connections: dict[int, WorkerConnection] = {}
        ready = False
        try:
            while missing := [rank for rank in ranks if rank not in connections]:
                if time.monotonic() > until:
                    raise JoinError(
                        f"init_master_worker: {rank_list(missing)} did not connect within {until - began:.1f} s.\n"
                        "  Check the output of the missing workers. To wait longer, pass"
                        " init_master_worker(timeout=...)."
                    )
                # A worker that has exited is reported now, and not when the time limit has passed.
                _raise_trouble(pool, missing)
                connections |= self.accept(welcome, missing)
            for connection in connections.values():
                if trouble := _await_ready(connection, until):
                    raise ConfigError(f"init_master_worker: {connection}: {trouble}")
            ready = True
        finally:
            if not ready:
                for connection in connections.values():
                    close_connection(connection.socket)
        return [connections[rank] for rank in sorted(connections)]

    def accept(self, welcome: Welcome, missing: Sequence[int]) -> dict[int, WorkerConnection]:
        """Return the missing workers that have connected. Wait up to 0.1 s for one."""
        found: dict[int, WorkerConnection] = {}
        select.select([self._listener.wake], [], [], _LOOK_S)
        for sock in self._listener.take():
            try:
                member = receive_message(sock, WorkerHello, time.monotonic() + _HELLO_S).member
                if member.rank not in missing or member.rank in found:
                    raise ConnectionError(f"unexpected worker: {member}")
                send_message(sock, welcome)
            # It has died or is not expected; if it was expected, `gather` reports it as missing.
            except (OSError, msgspec.MsgspecError):
                sock.close()
                continue
            found[member.rank] = WorkerConnection(member.rank, member.host, member.pid, sock)
        return found

    def close(self) -> None:
        """Close the store and the listener."""
        self._opened.close()


def _raise_trouble(pool: WorkerPool | None, missing: Sequence[int]) -> None:
    if pool is None:
        return
    if pool.trouble is not None:
        raise pool.trouble
    for rank in missing:
        if rank in pool.ended:
            raise ConfigError(
                f"init_master_worker: rank {rank} terminated during its start ({describe_end(pool.ended[rank])}).\n"
                "  Check its output."
            )


def _await_ready(connection: WorkerConnection, until: float) -> str:
    """Return the reason why a worker cannot work, or ""."""
    try:
        return receive_message(connection.socket, WorkerReady, until).trouble
    except builtins.TimeoutError:
        return "the worker was not ready in time.\n  To wait longer, pass init_master_worker(timeout=...)."
    except OSError:
        return "the worker terminated during its start.\n  Check its output."


def _abandon_in_child() -> None:
    global _workers
    _workers = None  # otherwise the child could not gather workers of its own


os.register_at_fork(after_in_child=_abandon_in_child)
