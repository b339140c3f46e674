"""The world: the default process group of this process, and the only global state of the package."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import allranks
from allranks import _engines
from allranks._api import torch_world
from allranks._base.errors import ConfigError, MismatchError, NotInitializedError, UsageError, rank_list
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call.futures import end_futures
from allranks._elastic.early_groups import early_groups_of
from allranks._elastic.history import GroupHistory
from allranks._elastic.joining import join_elastic
from allranks._elastic.membership_store import MembershipStore
from allranks._engines.compute_threads import share_cpus
from allranks._group.process_group import ProcessGroup
from allranks._rendezvous import rendezvous
from allranks.launch.ranks.rank import this_rank
from allranks.launch.spec.target import SERVE, Target

if TYPE_CHECKING:
    import torch

    from allranks._call.types import Stats
    from allranks._engines.c10d.store import GroupStore
    from allranks._engines.spec import Meeting

__all__ = [
    "GroupMember",
    "abort_groups",
    "calls_made",
    "behind",
    "destroy_process_group",
    "establish",
    "establish_elastic",
    "first_history",
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "open_groups",
    "register",
    "renew_groups",
    "replace_world",
    "resolve_group",
    "stats",
    "torch_store",
]

DEFAULT_TIMEOUT_S = 1800.0  # the default of torch

_world: ProcessGroup | None = None
_groups: list[ProcessGroup] = []  # created by new_group and related functions; closed with the world
_store: GroupStore | None = None  # for torch's default group around the allranks world


class _GroupNames(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        return _world


class group(metaclass=_GroupNames):
    """``group.WORLD``: the default group, or None before ``init_process_group``."""


class GroupMember(metaclass=_GroupNames):
    """``GroupMember.WORLD``: torch's other name for ``group.WORLD``.

    ``new_group`` returns ``GroupMember.NON_GROUP_MEMBER`` to a rank that is not in the group. For type checkers it is
    compatible with every type, so the result of ``new_group`` can be used as a group.
    """

    NON_GROUP_MEMBER: Any = -100  # the value of torch


def resolve_group(given: ProcessGroup | int | None) -> ProcessGroup:
    """Return the group that an argument denotes. None, and 0 as in THD, denote the world.

    Raises:
        NotInitializedError: The world does not exist.
        UsageError: The argument is not a group, or this rank is not a member of it.
    """
    if given is None or (type(given) is int and given == 0):
        if _world is None:
            # Not imported here: a program that does not use torch.distributed need not load it.
            torchs = sys.modules.get("torch.distributed")
            if torchs is not None and torchs.is_available() and torchs.is_initialized():
                raise NotInitializedError(
                    f"torch.distributed is initialized with its own backend {torchs.get_backend()}, but allranks is not"
                    " initialized.\n  Call allranks.init_process_group(), or use the function of torch.distributed; or"
                    ' pass the backend "allranks" to torch.distributed.init_process_group().'
                )
            raise NotInitializedError(
                "the default process group has not been initialized: call allranks.init_process_group() first"
            )
        return _world
    if isinstance(given, ProcessGroup):
        return given
    if (ours := behind(given)) is not None:
        return ours
    if type(given) is type(GroupMember.NON_GROUP_MEMBER) and given == GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            "Invalid process group specified: this rank is not a member of it.\n  Use it only on members of the group."
        )
    raise UsageError(f"group must be a ProcessGroup or None, not {type(given).__name__}")


def behind(given: Any) -> ProcessGroup | None:
    """Return the allranks group behind a torch group of the plugin, or None."""
    if not hasattr(given, "_get_backend"):
        return None
    import torch

    cpu = torch.device("cpu")
    return getattr(given._get_backend(cpu), "allranks_group", None) if cpu in given._device_types else None


def register(made: ProcessGroup) -> None:
    """Register a group that is closed with the world."""
    _groups.append(made)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Connect with the other ranks and create the default process group.

    Args:
        backend: The engine that transfers tensors: ``"native"``, shared memory between the ranks of a host and TCP
            between hosts, which copies GPU tensors to and from the host; ``"tcp"``, the same without shared memory;
            ``"gloo"`` and ``"nccl"``, the backends inside torch; ``"mpi"``, MPI by mpi4py, in a job that mpirun has
            started; an engine that an installed package provides (docs/extending.md); or one engine per device type, as
            in ``"cpu:gloo,cuda:nccl"``. None means ``"cpu:native,cuda:nccl"``. In a list, engines whose device or
            library is missing are ignored. docs/engines.md describes the features of each engine. If no engine is
            named, ALLRANKS_BACKEND (``allranks run --backend``) is used if it is set.
        init_method: How the ranks find each other (with mpi, MPI itself does this and the value is ignored):

            - ``env://`` (the default): the launcher's store, or the variables RANK, WORLD_SIZE, MASTER_ADDR and
              MASTER_PORT. MASTER_ADDR may be ``host:port``. If none of them is set, the variables of mpirun, mpiexec,
              srun or the like are used (docs/launching.md). If these are missing, too, the world is this process alone.
            - ``tcp://host:port``: rank 0 listens there.
            - ``file:///path``: rank 0 writes its address into that file.
            - a URL whose scheme was added with ``register_rendezvous_handler``.
        timeout: Maximum time for which this call and every later call waits for other ranks, as a timedelta or in
            seconds. None: 30 minutes.
        world_size: Number of ranks. -1: from the environment, or from MPI.
        rank: Rank of this process, 0 to world_size - 1. -1: from the environment, or from MPI.
        store: ``TCPStore``, ``FileStore``, ``HashStore`` or ``PrefixStore``, of allranks or torch, or an object with
            their methods, instead of ``init_method``. Rank and world size are then required.
        group_name: Name of the group in error messages. ``world`` if empty.
        pg_options: Must be None: no options are supported.
        device_id: Device on which this rank works, an index or a device. It becomes the current device.

    Raises:
        ConfigError: A setting is missing or wrong. The message names it and gives an example.
        JoinError: At the timeout, ranks are missing, duplicated or inconsistent. The message names them.
        UsageError: The process group already exists. (In a forked child it may be the parent's group. A new group then
            replaces it.)

    Cost:
        a few milliseconds between ranks of one host, and a segment of about 1 MiB + 256 KiB per rank of the group in
        each process. No TCP port is opened if the launcher started the ranks.

    Example:
        >>> import allranks as dist
        >>> dist.init_process_group()
        >>> dist.get_rank(), dist.get_world_size()
        (0, 1)
        >>> dist.destroy_process_group()
    """
    if _world is not None and not _world.inherited:
        raise UsageError("the default process group already exists: call destroy_process_group() first")
    for argument, given in (("backend", backend), ("init_method", init_method)):
        if not isinstance(given, str | None):
            raise UsageError(f"init_process_group: {argument} must be a string or None, not {given!r}")
    for argument, number in (("world_size", world_size), ("rank", rank)):
        if not isinstance(number, Integral):
            raise UsageError(f"init_process_group: {argument} must be a whole number, not {number!r}")
    if not isinstance(timeout, timedelta | Real | None):
        raise UsageError(
            f"init_process_group: timeout must be a timedelta, a number of seconds or None, not {timeout!r}"
        )
    engine_name = chosen_backend(backend)
    if pg_options is not None:
        raise UsageError(
            f"init_process_group: the {engine_name} engine does not support pg_options {pg_options!r}.\n"
            "  Omit pg_options."
        )
    if device_id is not None:
        _make_current(device_id, engine_name)
    timeout_s = DEFAULT_TIMEOUT_S if timeout is None else seconds_of(timeout)
    if not timeout_s > 0:  # also rejects nan
        raise UsageError(f"init_process_group: timeout must be positive, not {timeout!r}")
    if store is not None and init_method is not None:
        raise UsageError("init_process_group: pass either store or init_method, not both")
    if store is None and init_method in (None, "env://") and rank == world_size == -1:
        _refuse_workers()
    if _world is not None:
        _close_all()  # the parent's groups, and torch's groups around them, whose names this process has inherited
    name = group_name or "world"
    membership = MembershipStore.of_elastic_job(init_method, timeout_s=timeout_s, store=store)
    # Before the ranks connect, so that an invalid value raises on this rank without a wait.
    offers = torch_world.is_wanted()
    if membership is not None:
        establish_elastic(membership, join_elastic(membership, engine_name, name, timeout_s))
        if offers:
            torch_world.offer(lambda: allranks.torch_group())
        return
    meeting: Meeting
    meets_by = _engines.meets_by(engine_name)
    if meets_by is not None:
        meeting = meets_by(int(rank), int(world_size), timeout_s)
    else:
        meeting = rendezvous.join(
            init_method, rank=int(rank), world_size=int(world_size), timeout_s=timeout_s, store=store
        )
    establish(engine_name, meeting, name, timeout_s, torch_store=torch_world.is_possible())
    if offers:
        torch_world.offer(lambda: allranks.torch_group())


def _refuse_workers() -> None:
    """Raise in a job of a master and its workers: the workers serve the master and would never join."""
    launched = this_rank()
    if launched is not None and launched.target.mode == "master":
        raise UsageError(
            "init_process_group: allranks run --mode master starts this program only on rank 0. The other ranks are"
            " workers of init_master_worker and join no process group.\n  Omit --mode master, or call"
            " init_master_worker() instead of init_process_group()."
        )
    if launched is not None and launched.target == Target("module", SERVE):
        raise UsageError(
            "init_process_group: this process is a worker of a master, and the master joins no process group.\n  To"
            " create a group of workers, pass a rendezvous: init_process_group(init_method='file:///path', rank=...,"
            " world_size=...)."
        )


def establish(
    engine_name: str,
    meeting: Meeting,
    name: str,
    timeout_s: float,
    torch_store: bool = False,
) -> ProcessGroup:
    """Connect the ranks of a rendezvous and make their group the world. Closes the meeting.

    Args:
        engine_name: Engine that transfers tensors. The ranks compare it.
        meeting: The rendezvous.
        name: Name of the group.
        timeout_s: Timeout of its calls, in seconds.
        torch_store: torch.distributed may receive a default group around it, which needs a store.
    """
    global _store, _world
    store, address = None, b""
    try:
        if torch_store:
            from allranks._engines.c10d.store import GroupStore  # late: torch may be built without torch.distributed

            store = GroupStore(meeting.rank, meeting.members, timeout_s)
            address = store.record

        def exchange(record: bytes) -> list[bytes]:
            # One exchange transfers the engine's record, the backend's name, and the address of the store.
            rows = meeting.exchange(record + engine_name.encode() + b"\0" + address, timeout_s)
            tails = [row[len(record) :].partition(b"\0") for row in rows]
            names = [engine.decode() for engine, _, _ in tails]
            if store is not None:
                store.record = tails[0][2]
            if len(set(names)) > 1:
                requested = "; ".join(
                    f"{rank_list([r for r, n in enumerate(names) if n == name])} for '{name}'"
                    for name in dict.fromkeys(names)
                )
                raise MismatchError(
                    f"init_process_group: the ranks requested different backends: {requested}.\n"
                    "  Pass the same backend (argument or ALLRANKS_BACKEND) on every rank."
                )
            return [row[: len(record)] for row in rows]

        # Before the engine, which compares torch's threads with the CPUs to decide how ranks wait.
        share_cpus(meeting.rank, meeting.members)
        engine = _engines.make_engine(engine_name, meeting.rank, meeting.members, exchange, name, timeout_s)
    except BaseException:
        if store is not None:
            # The store has a listening socket, which would otherwise stay open.
            store.close()
        raise
    finally:
        meeting.close()
    _world, _store = ProcessGroup(engine, name, meeting.rank, meeting.members, timeout_s), store
    _world.register, _world.is_world = register, True
    _world.history = first_history(meeting, engine_name, name, timeout_s)
    return _world


def establish_elastic(membership: MembershipStore, made: ProcessGroup) -> None:
    """Make a group that ``join_elastic`` has created the world."""
    global _store, _world
    _world = made
    if torch_world.is_possible():
        from allranks._elastic.torch_store import ElasticStore  # late: torch may be built without torch.distributed

        _store = ElasticStore(membership, made.timeout_s)
    _world.register, _world.is_world = register, True


def open_groups() -> bool:
    """Return whether any group other than the world could not be recreated if other ranks join."""
    early = early_groups_of(resolve_group(None))
    stays = [] if early is None else early.of_replicas
    return not all(group.recreated_on_close or group in stays for group in _groups)


def calls_made() -> int:
    """Return the number of calls on other ranks that this process has finished, in all its groups."""
    return sum(group.stats().calls for group in (resolve_group(None), *_groups) if group._is_open)


def abort_groups() -> None:
    """Abort the calls of all groups except the world, on every rank.

    Otherwise a rank could wait in one of these groups for a rank that makes no further call in it.
    """
    for other in _groups:
        if other._is_open:
            other.abort()


def renew_groups() -> None:
    """Reconnect, after a loss, the groups created before the training loop. Close all others except the world.

    Raises:
        PeerLostError: A rank was lost while the groups were connected.
        AbortedError: Another rank has detected a loss.
        TimeoutError: A rank did not take part.
        JoinError: Members of a group could not connect.
    """
    early = early_groups_of(resolve_group(None))
    if early is not None:
        early.renew()
    kept = [other for other in _groups if early is not None and other in early]
    for other in _groups:
        if other not in kept:
            other._close_because(
                "was closed when a rank was lost.\n  Recreate it in a step, or before the training loop."
            )
    _groups[:] = kept


def first_history(meeting: Meeting, engine_name: str, name: str, timeout_s: float) -> GroupHistory | None:
    """Return the group history of the first group of a rendezvous, or None if no store outlives the rendezvous."""
    membership = MembershipStore.of(meeting) if isinstance(meeting, rendezvous.JobMeeting) else None
    if membership is None:
        return None
    starts = [(member.rank, 0) for member in meeting.members]
    return GroupHistory(membership, f"{membership.prefix}world/", engine_name, name, timeout_s, meeting.rank, starts)


def replace_world(made: ProcessGroup) -> None:
    """Make a group the world. All other groups are closed, because their rank numbers are no longer valid."""
    global _store, _world
    # First: torch must not create its default group around a world that is being closed.
    torch_world.withdraw()
    for other in _groups:
        if other is not made:
            other.close()
    _groups.clear()
    if _store is not None:
        _store.close()
    _world, _store = made, None
    made.register, made.is_world = register, True


def torch_store() -> GroupStore | None:
    """Return the store of torch's default group around the world, or None if torch created the world."""
    return _store


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """Leave the group (None: the world). Always returns.

    Other ranks that later need this one raise a PeerLostError. Pending calls of this rank fail. Leaving the world also
    closes all other groups.

    Raises:
        NotInitializedError: The group does not exist.
    """
    global _world
    if group == GroupMember.NON_GROUP_MEMBER:
        return
    leaving = resolve_group(group)
    if leaving is _world:
        _close_all()
    else:
        leaving.close()
        if leaving in _groups:
            _groups.remove(leaving)


def is_available() -> bool:
    """Return True: allranks needs nothing that a build of torch may lack."""
    return True


def is_initialized() -> bool:
    """Return whether the default process group exists."""
    return _world is not None


def get_rank(group: ProcessGroup | int | None = None) -> int:
    """Return this process's rank in the group (None: the world), or -1 if it is not a member.

    Raises:
        NotInitializedError: The group does not exist.

    Example:
        >>> dist.get_rank(), dist.get_world_size(), dist.get_backend()  # on rank 0 of 2
        (0, 2, 'native')
    """
    return -1 if group == GroupMember.NON_GROUP_MEMBER else resolve_group(group).rank()


def get_world_size(group: ProcessGroup | int | None = None) -> int:
    """Return the number of ranks in the group (None: the world), or -1 if this process is not a member.

    Raises:
        NotInitializedError: The group does not exist.
    """
    return -1 if group == GroupMember.NON_GROUP_MEMBER else resolve_group(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of the group's engine (None: the world's engine).

    Raises:
        NotInitializedError: The group does not exist.
    """
    return resolve_group(group).backend


def stats(group: ProcessGroup | None = None) -> Stats:
    """Return this process's statistics of the group so far: calls, bytes, seconds (None: the world).

    Raises:
        NotInitializedError: The group does not exist.
    """
    return resolve_group(group).stats()


def chosen_backend(backend: str | None) -> str:
    """Return the normalized backend of ``init_process_group(backend)``, which ALLRANKS_BACKEND sets if it is None.

    Raises:
        ConfigError: The backend does not exist, or is not available.
    """
    configured = None if backend else os.environ.get("ALLRANKS_BACKEND")
    try:
        return _engines.check_backend(configured or backend)
    except ConfigError as error:
        raise (ConfigError(f"ALLRANKS_BACKEND: {error}") if configured else error) from None


def _make_current(device_id: torch.device | int, engine_name: str) -> None:
    import torch

    try:
        device = torch.device(device_id)
        if device.type == "cpu":
            return
        moved = _engines.moves(engine_name, device.type)
        if moved and device.type == "worker":  # torch's guard for devices in Python accepts any index
            torch.get_device_module(device).set_device(device)
        elif moved:
            torch.accelerator.set_device_index(device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"device_id {device_id!r}: {error}") from error
    if not moved:
        raise UsageError(
            f"device_id {device_id!r}: the {engine_name} engine does not support {device.type} tensors.\n"
            f"  Omit device_id, or pass a backend for {device.type} tensors."
        )


def _close_all() -> None:
    global _store, _world
    # First: torch must not create its default group around a world that is being closed.
    torch_world.withdraw()
    for made in (*_groups, _world):
        if made is not None:
            history = made.history
            made.close()
            if history is not None and not made.inherited:
                history.membership.close()
    _groups.clear()
    if _store is not None:
        _store.close()
    _world = _store = None


def _at_exit() -> None:
    # A forked child must not close the groups of its parent.
    if _world is None or not _world.inherited:
        _close_all()
    # After the groups: closing them ends all pending calls, so their futures can complete.
    end_futures()


# A process that exits normally leaves deliberately: the other ranks detect a departure instead of a death.
atexit.register(_at_exit)
# The world is kept, so that a data loader's worker can read its parent's rank, as with torch.
os.register_at_fork(after_in_child=_groups.clear)


publish(globals())
