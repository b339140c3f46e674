"""Groups of some of the ranks: new_group and related functions, and the mapping between ranks of groups.

The members of a new group exchange their records through an existing group. All ranks of that group take part in one
small all_gather, which also compares their requests. No store and no port is needed after init_process_group.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from allranks import _engines
from allranks._api.world import (
    GroupMember,
    first_history,
    is_initialized,
    register,
    replace_world,
    resolve_group,
)
from allranks._base.errors import ConfigError, MismatchError, UsageError, rank_list
from allranks._base.integers import integer_of
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call.purpose import part_of
from allranks._cluster.detection import detect
from allranks._cluster.env import read_int
from allranks._elastic.early_groups import early_groups_of
from allranks._elastic.history import GroupHistory
from allranks._elastic.replay import ReplayEngine
from allranks._engines.spec import RECORD_BYTES
from allranks._group.exchange import exchange_locally, gather_rows
from allranks._group.process_group import ProcessGroup
from allranks._rendezvous import rendezvous

if TYPE_CHECKING:
    import torch

    from allranks._elastic.early_groups import EarlyGroups
    from allranks._engines.base import Engine

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "early_groups",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "history_of",
    "meet_as_group",
    "merge_remote_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "set_timeout",
    "shrink_group",
    "split_group",
    "split_part",
]

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1
"""Flags of ``shrink_group``, with torch's values."""

_DIGEST_BYTES = 16
_PART = struct.Struct("!I?")  # number of members of a part, and whether the rank is one of them

_made = 0  # used in the names of groups; the same on all ranks that create the same groups


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
    """Create a group of some ranks. All ranks of the world call this, in the same order.

    Args:
        ranks: The members, as ranks of the world. None: all ranks.
        timeout: Timeout of its calls, as a timedelta or in seconds. None: the world's timeout.
        backend: Its engine, see ``init_process_group``. None: the world's engine.
        pg_options: Must be None: no options are supported.
        use_local_synchronization: Only the members call this.
        group_desc: Name of the group in error messages.
        device_id: Accepted for compatibility with torch. Groups are not bound to a device.
        sort_ranks: Number the members by their rank in the world, not in the order of ``ranks``.

    Returns:
        The group. On other ranks ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        UsageError: The ranks are invalid.
        MismatchError: The ranks request different groups. Raised on every rank.

    Cost:
        One all_gather of 40 bytes. Members of one host map one shared memory, whose pages are allocated when they are
        first written. Connections between members of different hosts are created when they are first needed.

    Example:
        >>> alone = dist.new_group([0])  # on each of 2 ranks; rank 0 shows:
        >>> if dist.get_rank() == 0:
        ...     print(dist.get_world_size(alone), dist.get_process_group_ranks(alone))
        1 [0]
    """
    world = resolve_group(None)
    members = _checked(range(world.size()) if ranks is None else ranks, world.size(), "new_group: ranks")
    if sort_ranks:
        # As in torch: the numbering then does not depend on the order in which a rank lists the members.
        members = sorted(members)
    engine = _engines.check_backend(backend or world.backend)
    if pg_options is not None:
        raise UsageError(
            f"new_group: the {engine} engine does not support pg_options {pg_options!r}.\n  Omit pg_options."
        )
    outsider: ProcessGroup = GroupMember.NON_GROUP_MEMBER
    if use_local_synchronization and world.rank() not in members:
        return outsider
    with part_of("new_group"):
        made = _make(world, [members], timeout, engine, group_desc, use_local_synchronization)
    return outsider if made is None else made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into disjoint groups in one call. All ranks of the group call this.

    Args:
        parent_pg: The group to split. None: the world.
        split_ranks: The members of each part, as ranks of ``parent_pg``, in the order of their ranks in the part.
        timeout: Timeout of the parts' calls, as a timedelta or in seconds. None: the parent's timeout.
        pg_options: Must be None: no options are supported.
        group_desc: Name of this rank's part in error messages.
        backend: The parts' engine. None: the parent's engine.

    Returns:
        The part that contains this rank, or None.

    Raises:
        UsageError: The ranks are invalid, or a rank is in two parts.
        MismatchError: The ranks request different parts. Raised on every rank.

    Example:
        >>> part = dist.split_group(split_ranks=[[1], [0]])  # on each of 2 ranks; rank 0 shows:
        >>> part.size(), dist.get_process_group_ranks(part)
        (1, [0])
    """
    parent = resolve_group(parent_pg)
    if not split_ranks:
        raise UsageError(f"split_group: split_ranks must name at least one part, not {split_ranks!r}")
    if pg_options is not None:
        raise UsageError(f"split_group: pg_options {pg_options!r} is not supported.\n  Omit pg_options.")
    parts = [_checked(part, parent.size(), "split_group: split_ranks") for part in split_ranks]
    together = [rank for part in parts for rank in part]
    if twice := _repeated(together):
        raise UsageError(f"split_group: {twice} in more than one part.\n  Assign each rank to one part.")
    world_parts = [[parent.ranks[rank] for rank in part] for part in parts]
    engine = _engines.check_backend(backend or parent.backend)
    with part_of("split_group"):
        return _make(parent, world_parts, timeout, engine, group_desc, False)


def split_part(
    parent: ProcessGroup, ranks: Sequence[int], timeout: timedelta | float | None, group_desc: str | None
) -> ProcessGroup | None:
    """Split a group, where each rank knows only its own part. All ranks of the group call this.

    Args:
        parent: The group to split.
        ranks: The members of the part of this rank, in order, as ranks of ``parent``. If this rank is in no part: the
            members of any part.
        timeout: Timeout of the part's calls, as a timedelta or in seconds. None: the parent's timeout.
        group_desc: Name of the part in error messages.

    Returns:
        The part that contains this rank, or None.

    Raises:
        UsageError: The ranks are invalid.
        MismatchError: The parts of the ranks overlap, or a member is missing. Raised on every rank.
    """
    part = [parent.ranks[rank] for rank in _checked(ranks, parent.size(), "split_group")]
    with part_of("split_group"):
        return _make(parent, [part], timeout, parent.backend, group_desc, False, own_parts=True)


def merge_remote_group(
    store: Any,
    size: int,
    timeout: timedelta | float | None = None,
    group_desc: str | None = None,
    group: ProcessGroup | None = None,
) -> ProcessGroup:
    """Create a group of the ranks of several groups, which may belong to several jobs. All their ranks call this.

    Args:
        store: A store that all ranks reach, for example a ``TCPStore`` of one of the jobs. Each merge needs a store, or
            a ``PrefixStore``, that no merge has used before.
        size: Number of ranks in all.
        timeout: How long to wait for the others, and the timeout of the new group's calls, as a timedelta or in
            seconds. None: the timeout of ``group``.
        group_desc: Name of the new group in error messages.
        group: The group of this rank. None: the world.

    Returns:
        The new group. Its ranks are numbered in the order in which they have arrived at the store. In
        ``get_process_group_ranks``, they have these numbers, because they belong to no common world.

    Raises:
        JoinError: Ranks did not arrive in time.
        UsageError: More than ``size`` ranks have arrived.
    """
    old = resolve_group(group)
    total = integer_of(size)
    if total is None or total < 1:
        raise UsageError(f"merge_remote_group: size must be an integer of at least 1, not {size!r}")
    timeout_s = old.timeout_s if timeout is None else seconds_of(timeout)
    rank = int(store.add("allranks merge", 1)) - 1
    if rank >= total:
        raise UsageError(
            f"merge_remote_group: {rank + 1} ranks have arrived at the store, more than size={total}.\n  Pass the"
            " number of ranks of all groups as size, and use a new store or PrefixStore for each merge."
        )
    return meet_as_group(store, rank, total, timeout_s, old.backend, group_desc or "merged group")


def meet_as_group(
    store: Any, rank: int, size: int, timeout_s: float, backend: str, name: str, ranks: Sequence[int] | None = None
) -> ProcessGroup:
    """Create a group of processes that share only a store. ``ranks``: their numbers in a common world, if it exists."""
    # A copy of the environment: a rank or size that differs from the job's looks like an inner job. Then `join` removes
    # the variables of the outer one, which this process still needs for its own world.
    environ = dict(os.environ)
    meeting = rendezvous.join(None, rank=rank, world_size=size, timeout_s=timeout_s, store=store, environ=environ)
    numbers = range(size) if ranks is None else ranks
    members = [replace(member, rank=number) for member, number in zip(meeting.members, numbers, strict=True)]

    def exchange(record: bytes) -> list[bytes]:
        return meeting.exchange(record, timeout_s)

    try:
        engine = _engines.make_engine(backend, rank, members, exchange, name, timeout_s)
    finally:
        meeting.close()
    made = ProcessGroup(engine, name, rank, members, timeout_s)
    made.history = first_history(meeting, backend, name, timeout_s)
    made.register = register
    register(made)
    return made


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Divide the world (or ``group``) into groups of consecutive ranks, all of one size. All its ranks call this.

    Args:
        group_size: Ranks in each group. None: the number of ranks on one host (LOCAL_WORLD_SIZE), or all
            ranks if it is not set.
        group: The group to divide. None: the world.
        timeout: Timeout of their calls, as a timedelta or in seconds. None: the world's timeout.
        backend: See ``new_group``.
        pg_options: See ``new_group``.
        group_desc: See ``new_group``.

    Returns:
        This rank's group, and all groups in order.

    Raises:
        UsageError: The size does not divide the number of ranks.
        ConfigError: LOCAL_WORLD_SIZE is not a whole number.

    Example:
        >>> mine, all_of_them = dist.new_subgroups(group_size=1)  # on each of 2 ranks; rank 0 shows:
        >>> mine.size(), len(all_of_them)
        (1, 2)
    """
    cut = resolve_group(group)
    size = group_size if group_size is not None else read_int(os.environ, "LOCAL_WORLD_SIZE", 1) or cut.size()
    if not 0 < size <= cut.size() or cut.size() % size:
        source = " (LOCAL_WORLD_SIZE)" if group_size is None else ""
        raise UsageError(
            f"new_subgroups: group_size {size}{source} does not divide the {cut.size()} ranks of group '{cut.name}'.\n"
            f"  Pass a divisor of {cut.size()} as group_size."
        )
    if pg_options is not None:
        raise UsageError(f"new_subgroups: pg_options {pg_options!r} is not supported.\n  Omit pg_options.")
    engine = _engines.check_backend(backend or cut.backend)
    parts = [list(cut.ranks[i : i + size]) for i in range(0, cut.size(), size)]
    with part_of("new_group"):
        # All ranks take part in the creation of each part, because its exchange is a collective of the whole group.
        made = [_make(cut, [part], timeout, engine, group_desc, False) for part in parts]
    mine = next(part for part in made if part is not None)
    return mine, [GroupMember.NON_GROUP_MEMBER if part is None else part for part in made]


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup]]:
    """Create disjoint groups, one after the other.

    Args:
        ranks_per_subgroup_list: The members of each group, as ranks of the world.
        timeout: Timeout of their calls, as a timedelta or in seconds. None: the world's timeout.
        backend: See ``new_group``.
        pg_options: See ``new_group``.
        group_desc: See ``new_group``.

    Returns:
        This rank's group (None if it is in no group), and all groups in order.

    Raises:
        UsageError: No group is given, the ranks are invalid, or a rank is in two groups.

    Example:
        >>> mine, both = dist.new_subgroups_by_enumeration([[1], [0]])  # on each of 2 ranks; rank 0 shows:
        >>> mine is both[1]
        True
    """
    if not ranks_per_subgroup_list:
        raise UsageError("new_subgroups_by_enumeration: ranks_per_subgroup_list must name at least one group")
    together = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    if twice := _repeated(together):
        raise UsageError(
            f"new_subgroups_by_enumeration: {twice} in more than one group.\n"
            "  Assign each rank to one group, or create overlapping groups with new_group."
        )
    groups = [
        new_group(ranks, timeout=timeout, backend=backend, pg_options=pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    mine = next((made for made in groups if made != GroupMember.NON_GROUP_MEMBER), None)
    return mine, groups


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Translate a rank of the world (global rank) into a rank of ``group``.

    Args:
        group: The group.
        global_rank: A rank of the world.

    Raises:
        UsageError: The rank is not a member.
    """
    resolved, number = resolve_group(group), integer_of(global_rank)
    if number is None:
        raise TypeError(
            f"get_group_rank: global_rank must be a rank of the world (an integer), not {type(global_rank).__name__}"
        )
    if number not in resolved.ranks:
        raise UsageError(
            f"get_group_rank: rank {number} of the world is not in group '{resolved.name}':"
            f" expected one of {rank_list(resolved.ranks)}"
        )
    return resolved.ranks.index(number)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Translate a rank of ``group`` into a rank of the world (global rank).

    Args:
        group: The group.
        group_rank: A rank of the group.

    Raises:
        UsageError: The group has no such rank.
    """
    resolved, number = resolve_group(group), integer_of(group_rank)
    if number is None:
        raise TypeError(
            f"get_global_rank: group_rank must be a rank of group '{resolved.name}' (an integer), not"
            f" {type(group_rank).__name__}"
        )
    if not 0 <= number < resolved.size():
        raise UsageError(
            f"get_global_rank: group '{resolved.name}' has no rank {number}: expected 0 to {resolved.size() - 1}"
        )
    return resolved.ranks[number]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the members of a group (None: the world) as ranks of the world, in the order of their group ranks.

    Raises:
        NotInitializedError: The group does not exist.

    Example:
        >>> dist.get_process_group_ranks(None)  # on 2 ranks
        [0, 1]
    """
    return list(resolve_group(group).ranks)


def set_timeout(timeout: timedelta | float, group: ProcessGroup | None = None) -> None:
    """Change the timeout of the calls of this rank on a group that begin later. See ``ProcessGroup.set_timeout``.

    Args:
        timeout: The timeout, a timedelta or seconds.
        group: The process group. None: the world.

    Raises:
        UsageError: The timeout is not positive.
        NotInitializedError: The group is closed, or there is no world.

    Example:
        >>> dist.set_timeout(60)
    """
    resolve_group(group).set_timeout(timeout)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number on its host: LOCAL_RANK, or the number that mpirun, srun or the like have set.

    Args:
        fallback_rank: Result if no launcher has set it.

    Raises:
        ConfigError: It is not set and no fallback is passed, or LOCAL_RANK is not a whole number.
    """
    if (local_rank := read_int(os.environ, "LOCAL_RANK", 0)) is not None:
        return local_rank
    local_rank = detect(os.environ, launcher=False).local_rank
    if local_rank is not None:
        return local_rank
    if fallback_rank is None:
        raise ConfigError(
            "get_node_local_rank: LOCAL_RANK is not set, because no launcher has started this process.\n"
            "  Start the program with `allranks run`, or pass fallback_rank."
        )
    return int(fallback_rank)


def _checked(ranks: Sequence[int], size: int, what: str) -> list[int]:
    members = []
    for rank in ranks:
        number = integer_of(rank)
        if number is None:
            raise TypeError(f"{what}: expected a rank, not {type(rank).__name__}")
        if not 0 <= number < size:
            raise UsageError(f"{what}: {number} is not a rank; expected 0 to {size - 1}")
        members.append(number)
    if not members:
        raise UsageError(f"{what}: a group needs at least one member")
    if twice := _repeated(members):
        raise UsageError(f"{what}: {twice} listed more than once.\n  List each member once.")
    return members


def _repeated(ranks: Sequence[int]) -> str:
    """Return the ranks that occur more than once, with a verb for the text of an error. "" if there are none."""
    twice = [str(rank) for rank, times in Counter(ranks).items() if times > 1]
    if not twice:
        return ""
    return f"rank {twice[0]} is" if len(twice) == 1 else f"ranks {', '.join(twice)} are"


def _make(
    parent: ProcessGroup,
    parts: list[list[int]],
    timeout: timedelta | float | None,
    engine_name: str,
    description: str | None,
    local: bool,
    own_parts: bool = False,
) -> ProcessGroup | None:
    """Create the part that contains this rank, if any. The parts' members are ranks of the world.

    ``local``: only the members call this. ``own_parts``: each rank knows only the part that contains it.
    """
    global _made
    _made += 1
    timeout_s = parent.timeout_s if timeout is None else seconds_of(timeout)
    if timeout_s <= 0:
        raise UsageError(f"new group on '{parent.name}': timeout must be positive, not {timeout!r}")
    # The exchange compares it, so ranks that request different groups get an error instead of a hang.
    digest = hashlib.sha256(repr((parts, engine_name)).encode()).digest()[:_DIGEST_BYTES]
    me = parent.ranks[parent.rank()]
    mine = next((part for part in parts if me in part), None)

    def exchange(record: bytes) -> list[bytes]:
        if local:
            rows = exchange_locally(parent, parts[0], record)
        elif own_parts:
            rows = gather_rows(parent, record + digest + _PART.pack(len(parts[0]), mine is not None))
            _compare_parts(parent, [row[RECORD_BYTES:] for row in rows])
        else:
            rows = gather_rows(parent, record + digest)
            different = [rank for rank, row in enumerate(rows) if row[RECORD_BYTES:] != rows[0][RECORD_BYTES:]]
            if different:
                raise MismatchError(
                    f"new group on '{parent.name}': {rank_list(different)} requested other members or another engine "
                    f"than rank 0 (this is rank {parent.rank()}, which requested {parts}).\n"
                    "  Pass the same ranks and backend on every rank, and create groups in the same order."
                )
        wanted = mine or []
        return [rows[wanted.index(r) if local else parent.ranks.index(r)][:RECORD_BYTES] for r in wanted]

    def connect() -> Engine | None:
        if not local and (mine is None or len(mine) == 1):
            for _ in range(_engines.meetings(engine_name)):
                exchange(bytes(RECORD_BYTES))  # required for the collective of the other ranks
        if mine is None:
            return None
        through = parent.parent_of(mine)
        return _engines.make_engine(engine_name, mine.index(me), members, exchange, name, timeout_s, through)

    members = [parent.members[parent.ranks.index(rank)] for rank in mine or []]
    name = description or f"group {_made}"
    early = early_groups(parent)
    engine = connect() if early is None else early.connect(parent, connect)
    if mine is None:
        return None
    if early is not None:
        made = early.make(engine, mine, engine_name, name, timeout_s)
    else:
        assert engine is not None
        made = ProcessGroup(engine, name, mine.index(me), members, timeout_s)
        made.history = history_of(made, engine_name, mine, digest)
    made.register = register
    register(made)
    return made


def _compare_parts(parent: ProcessGroup, rows: Sequence[bytes]) -> None:
    """Check that the parts of all ranks are disjoint and complete. The result is the same on every rank.

    Args:
        parent: The group that is split.
        rows: By rank: a digest of its part, the number of members, and whether the rank is one of them.
    """
    members: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows):
        if _PART.unpack_from(row, _DIGEST_BYTES)[1]:
            members.setdefault(row, []).append(rank)
    wrong = [
        rank
        for row, ranks in members.items()
        for rank in ranks
        if len(ranks) != _PART.unpack_from(row, _DIGEST_BYTES)[0]
    ]
    if wrong:
        raise MismatchError(
            f"split_group on '{parent.name}' (rank {parent.rank()} of {parent.size()}): not all members of the part of"
            f" {rank_list(wrong)} passed this part.\n  Pass the same split_ranks on every rank, with each rank in one"
            " part."
        )


def early_groups(parent: ProcessGroup) -> EarlyGroups | None:
    """Return the registry for a new group of ``parent`` that is created before the training loop.

    None if the loop has begun, or if the job has none.
    """
    return early_groups_of(resolve_group(None)) if isinstance(parent.engine, ReplayEngine) else None


_of_members: Counter[bytes] = Counter()  # the same on all members, because they create their groups in the same order


def history_of(made: ProcessGroup, engine_name: str, ranks: list[int], digest: bytes) -> GroupHistory | None:
    """Return the group history of a new group of these ranks of the world, or None if the world has none."""
    if not is_initialized():  # the ranks are those of a world of torch on another backend
        return None
    world = resolve_group(None).history
    if world is None or any(rank >= len(world.members) for rank in ranks):
        return None
    members = [world.members[rank] for rank in ranks]
    _of_members[digest] += 1
    number = f"{world.generation}.{digest.hex()}.{'-'.join(map(str, ranks[:4]))}.{_of_members[digest]}"
    prefix = f"{world.membership.prefix}group/{number}/"
    return GroupHistory(world.membership, prefix, engine_name, made.name, made.timeout_s, world.slot, members)


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Create a group of the remaining ranks of a group. All ranks call this except those that are excluded.

    Unlike torch's function, it also excludes lost ranks that are not listed, so the list may be empty.

    Args:
        ranks_to_exclude: Ranks of the group to exclude, dead or alive.
        group: The group, which is closed. None: the world, which the new group replaces. All other groups are then
            closed, because ranks have other numbers.
        shrink_flags: ``SHRINK_ABORT``: first abort the pending calls, on every rank.
        pg_options: Must be None: no options are supported.

    Raises:
        UsageError: The ranks are invalid, or no store outlives the ranks.
        ExcludedError: The other ranks have continued without this rank.
        StoreLostError: The store is lost, so the ranks cannot agree on a new group.
    """
    old = resolve_group(group)
    if pg_options is not None:
        raise UsageError(f"shrink_group: pg_options {pg_options!r} is not supported.\n  Omit pg_options.")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise UsageError(f"shrink_group: shrink_flags must be SHRINK_DEFAULT or SHRINK_ABORT, not {shrink_flags!r}")
    excluded = list(ranks_to_exclude)
    if twice := _repeated(excluded):
        raise UsageError(f"shrink_group: {twice} listed more than once in ranks_to_exclude.\n  List each rank once.")
    if old.rank() in excluded:
        raise UsageError(
            f"shrink_group: rank {old.rank()} of group '{old.name}' excludes itself.\n"
            "  Call shrink_group only on the remaining ranks."
        )
    # Before the shrink: ranks that wait in a call would not take part in it.
    if shrink_flags == SHRINK_ABORT:
        old.abort()
    is_world = old is resolve_group(None)
    made = old.shrink(excluded)
    if is_world:
        made.renumber_as_world()
        replace_world(made)
    return made


publish(globals())
