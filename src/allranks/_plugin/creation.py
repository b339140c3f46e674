"""torch's groups on the backend. Each one wraps the world, or a group, of allranks.

torch calls ``create`` for its default group, and for each group that new_group creates.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch

from allranks import _engines
from allranks._api.groups import (
    early_groups,
    history_of,
    meet_as_group,
    merge_remote_group,
    shrink_group,
    split_group,
    split_part,
)
from allranks._api.world import (
    destroy_process_group,
    establish,
    establish_elastic,
    is_initialized,
    register,
    replace_world,
    resolve_group,
    torch_store,
)
from allranks._base.errors import UsageError
from allranks._base.forks import leak
from allranks._call.debug import DebugLevel, get_debug_level, set_debug_level
from allranks._elastic.joining import join_elastic
from allranks._elastic.membership_store import MembershipStore
from allranks._group.exchange import exchange_locally
from allranks._group.process_group import ProcessGroup
from allranks._plugin.adapt import adapt
from allranks._plugin.group import Derivation, TorchGroup
from allranks._plugin.names import NAME
from allranks._rendezvous import rendezvous

__all__ = ["adopting", "asks_for_default", "create", "group_of_torch", "helper_of"]

_c10d: Any = torch.distributed
_ENGINE = "native"
_KEEPS_ORDER = "sort_ranks" in inspect.signature(_c10d.new_group).parameters  # torch 2.10 always sorts
_FAR = 1 << 40  # larger than any number of torch's groups

MADE: dict[ProcessGroup, TorchGroup] = {}
"""torch's group around each wrapped group of allranks."""

_adopted: ProcessGroup | None = None  # set while torch_group lets torch create a group around it


def create(
    about: Any, options: Any, helper: Mapping[str, Any] | None, name: str, is_default: bool = True
) -> TorchGroup:
    """Create a group of torch.

    Args:
        about: torch's DistributedBackendOptions.
        options: Options of init_process_group(pg_options=...). Must be None.
        helper: See ``helper_of``.
        is_default: See ``asks_for_default``. Ignored for a group of given ranks.
        name: torch's name for the backend.

    Raises:
        UsageError: Options are given, or the worlds differ.
        JoinError: Ranks are missing.
    """
    if options is not None:
        raise UsageError(f"the {name} backend does not support pg_options {options!r}.\n  Omit pg_options.")
    adapt(_split_group)
    _leave_aborted()
    with _debug_level_of_torch():
        if _adopted is not None:
            ours = _adopted
        elif about.global_ranks_in_group:
            ours = _sub_group(about)
        else:
            ours = _the_world(about) if is_default else _alone(about)
        if ours in MADE:
            raise UsageError(
                f"torch.distributed already has group '{ours.name}'.\n  Call allranks.torch_group() to get it."
            )
        return _wrap(ours, name, {} if helper is None else _other_backends(helper, about, name))


@contextlib.contextmanager
def _debug_level_of_torch() -> Iterator[None]:
    """Create groups with the level DETAIL if the program has set it by torch.distributed.set_debug_level."""
    before = get_debug_level()
    if _c10d.get_debug_level() == _c10d.DebugLevel.DETAIL and "ALLRANKS_DEBUG" not in os.environ:
        set_debug_level(DebugLevel.DETAIL)
    try:
        yield
    finally:
        set_debug_level(before)


def _wrap(ours: ProcessGroup, name: str, others: Mapping[str, tuple[Any, Any]]) -> TorchGroup:
    ours.closing = partial(_close, ours)
    made = MADE[ours] = TorchGroup(ours, name, _leave, Derivation(_shrink, _split, _merge), others)
    ours.renewed = made.restart
    return made


def helper_of(caller: FrameType | None) -> Mapping[str, Any] | None:
    """Return the local variables of torch's function that creates groups, if it is the caller.

    torch passes only part of them to the backend.
    """
    # The watcher wraps the function.
    helper = inspect.unwrap(_c10d.distributed_c10d._new_process_group_helper)
    if caller is None or caller.f_code is not helper.__code__:
        return None
    return caller.f_locals


def asks_for_default(caller: FrameType | None) -> bool:
    """Return whether torch creates its default group, and not a program another group in addition.

    Programs whose ranks are in two worlds (OpenRLHF, slime, SGLang: a trainer and its inference engines) call torch's
    function that creates groups themselves. They pass a store of their own and no ranks.
    """
    if helper_of(caller) is None:
        return True
    assert caller is not None
    outer = caller.f_back
    if outer is not None and outer.f_code is _c10d.distributed_c10d._new_process_group_helper.__code__:
        outer = outer.f_back  # the wrapper of the watcher
    # The name alone does not decide: OpenRLHF and slime have a function of their own with the same name.
    return outer is None or (
        outer.f_code.co_name == _c10d.init_process_group.__name__ and outer.f_globals is vars(_c10d.distributed_c10d)
    )


@contextlib.contextmanager
def adopting(ours: ProcessGroup) -> Iterator[None]:
    """Let torch create its next group around a group of allranks."""
    global _adopted
    _adopted = ours
    try:
        yield
    finally:
        _adopted = None


def group_of_torch(ours: ProcessGroup) -> TorchGroup:
    """Return torch's group around a group of allranks. Let torch create it if it does not exist."""
    if ours not in MADE:
        with adopting(ours), _uncounted():
            made = _c10d.new_group(
                list(ours.ranks),
                timeout=timedelta(seconds=ours.timeout_s),
                backend=NAME,
                use_local_synchronization=True,
                **({"sort_ranks": False} if _KEEPS_ORDER else {}),
            )
            # torch versions that sort the ranks have numbered them differently.
            _c10d.distributed_c10d._world.pg_group_ranks[made] = {r: i for i, r in enumerate(ours.ranks)}
    return MADE[ours]


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    """Hide a group from torch's count of groups.

    torch 2.15 and later counts a group that only some ranks create, too, and names later groups by that number.
    """
    torchs = _c10d.distributed_c10d._world
    count = torchs.group_count
    torchs.group_count = count + _FAR * (1 + len(MADE))  # the name must still be new
    try:
        yield
    finally:
        torchs.group_count = count


def _the_world(about: Any) -> ProcessGroup:
    rank, size = about.group_rank, about.group_size
    if is_initialized() and not (world := resolve_group(None)).inherited:
        if (world.rank(), world.size()) != (rank, size):
            raise UsageError(
                f"allranks is initialized with rank {world.rank()} of {world.size()}, torch.distributed with rank "
                f"{rank} of {size}.\n  Pass the same rank and world size to both, or initialize only one of them."
            )
        return world
    timeout_s = about.timeout.total_seconds()
    if getattr(about, "enable_reconfigure", False):
        made = ProcessGroup.unconnected(_ENGINE, "world", timeout_s, rank)
        replace_world(made)
        return made
    membership = MembershipStore.of_elastic_job(None, timeout_s=timeout_s)
    if membership is not None:
        return _the_elastic_world(membership, rank, size, timeout_s)
    meeting = rendezvous.join(None, rank=rank, world_size=size, timeout_s=timeout_s, store=_of_attempt(about.store))
    return establish(_ENGINE, meeting, "world", timeout_s)


def _the_elastic_world(membership: MembershipStore, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    made = join_elastic(membership, _ENGINE, "world", timeout_s)
    if (made.rank(), made.size()) != (rank, size):
        made.close()
        raise UsageError(
            f"torch.distributed.init_process_group: this process replaces rank {rank} of {size}, but the ranks"
            f" were renumbered: it is rank {made.rank()} of {made.size()}.\n  Use allranks.init_process_group()."
        )
    establish_elastic(membership, made)
    return made


def _of_attempt(store: Any) -> Any:
    """Return a view of the store of torch's default group, with keys of their own for each start of the ranks.

    torchrun restarts ranks on the same store, which still contains the keys of the last attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _c10d.PrefixStore(f"attempt {attempt}/", store)


def _sub_group(about: Any) -> ProcessGroup:
    ranks, rank, timeout_s = about.global_ranks_in_group, about.group_rank, about.timeout.total_seconds()
    name = f"torch group {about.group_id}"
    if torch_store() is None:
        return _met(about, name, ranks, _of_attempt(about.store))
    # No exchange through the store: its server may not be a member.
    world = resolve_group(None)
    members = [world.members[r] for r in ranks]
    exchange = partial(exchange_locally, world, ranks)
    parent = world.parent_of(ranks)
    connect = partial(_engines.make_engine, world.backend, rank, members, exchange, name, timeout_s, parent)
    early = early_groups(world)
    if early is not None:
        made = early.make(early.connect(world, connect), ranks, world.backend, name, timeout_s)
    else:
        made = ProcessGroup(connect(), name, rank, members, timeout_s)
        digest = hashlib.sha256(f"{about.group_id} {ranks}".encode()).digest()[:16]
        made.history = history_of(made, world.backend, ranks, digest)
    made.register = register
    register(made)
    return made


def _alone(about: Any) -> ProcessGroup:
    """Create a group that belongs to no world. Its ranks connect through the program's store.

    They may be ranks of two jobs, which torchrun has restarted at different times.
    """
    return _met(about, f"torch group {about.group_id}", range(about.group_size), about.store)


def _met(about: Any, name: str, ranks: Sequence[int], store: Any) -> ProcessGroup:
    """Create a group in a world that allranks has not created."""
    rank, timeout_s = about.group_rank, about.timeout.total_seconds()
    return meet_as_group(store, rank, len(ranks), timeout_s, _ENGINE, name, ranks)


def _leave(ours: ProcessGroup) -> None:
    """Close a group that torch destroys."""
    # Removed first: closing the group must not lead back here.
    if MADE.pop(ours, None) is not None:
        ours.closing = None  # torch is already destroying its group
        destroy_process_group(ours)


def _leave_aborted() -> None:
    """Close the groups that torch has aborted: it forgets them without calling shutdown."""
    known = _c10d.distributed_c10d._world.pg_map
    for ours, made in list(MADE.items()):
        if made.aborted and made not in known:
            _leave(ours)


def _shrink(group: TorchGroup, ranks_to_exclude: Sequence[int], flags: int) -> TorchGroup:
    """Create a group of the remaining ranks. torch itself destroys the old group and replaces it by this one."""
    ours = group.allranks_group
    name = group.name()
    MADE.pop(ours, None)
    # shrink_group closes the old group, which must not destroy torch's group in turn.
    closing, ours.closing = ours.closing, None
    try:
        made = shrink_group(list(ranks_to_exclude), ours, flags)
    except BaseException:
        # torch keeps the old group if the shrink fails.
        MADE[ours], ours.closing = group, closing
        raise
    return _wrap(made, name, {})


def _split(group: TorchGroup, ranks: Sequence[int], timeout: timedelta | None, desc: str | None) -> TorchGroup | None:
    """Create the part of a group that contains this rank."""
    made = split_part(group.allranks_group, ranks, timeout, desc)
    return None if made is None else _wrap(made, group.name(), {})


def _split_group(
    parent: ProcessGroup,
    split_ranks: Any = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> TorchGroup | None:
    """Make the call torch.distributed.split_group in versions of torch that cannot split groups of CPU tensors."""
    name = MADE[parent].name()
    if backend is not None and str(backend).lower() != name:
        raise UsageError(f"split_group: the parts have the backend of their parent, {name}.\n  Omit backend.")
    # These versions number the members by their ranks in the parent.
    made = split_group(parent, list(map(sorted, split_ranks or [])), timeout, pg_options, group_desc)
    return None if made is None else group_of_torch(made)


def _merge(group: TorchGroup, store: Any, size: int, timeout: timedelta, desc: str | None) -> TorchGroup:
    """Create a group of this group's ranks and those of other groups."""
    return _wrap(merge_remote_group(store, size, timeout, desc, group.allranks_group), group.name(), {})


def _close(ours: ProcessGroup) -> None:
    """Destroy torch's group when allranks closes the wrapped group."""
    group = MADE.pop(ours, None)
    if group in _c10d.distributed_c10d._world.pg_map:  # otherwise torch failed to create it
        _c10d.destroy_process_group(group)


def _other_backends(helper: Mapping[str, Any], about: Any, ours: str) -> dict[str, tuple[Any, Any]]:
    """Return the requested backends of torch by device type, each with its BackendType."""
    config, group, others = helper["backend_config"], helper["pg"], {}
    for device, name in config.get_device_backend_map().items():
        if name == ours:
            continue
        # torch may already have created the backend of this device in the same group.
        if torch.device(device) in group._device_types:
            made = group._get_backend(torch.device(device))
        else:
            # A prefix for each device, because the backends use the same keys.
            made = _backend(name, _c10d.PrefixStore(f"{device}/", helper["prefix_store"]), about)
        if made is not None:
            others[device] = (_c10d.Backend.backend_type_map.get(name, _c10d.ProcessGroup.BackendType.CUSTOM), made)
    return others


def _backend(name: str, store: Any, about: Any) -> Any:
    """Return one of torch's backends, or None if torch was built without it."""
    rank, size, timeout = about.group_rank, about.group_size, about.timeout
    if name == "nccl":
        if not _c10d.is_nccl_available():
            return None
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _c10d.ProcessGroupNCCL(store, rank, size, options)
    if name == "gloo":
        return _c10d.ProcessGroupGloo(store, rank, size, timeout)
    plugin = _c10d.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UsageError(f"backend {name!r} cannot be combined with {NAME}. Expected nccl, gloo or a plugin of torch")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    return plugin.creator_fn(about, None)


def _leak_in_child() -> None:
    """Leak the parent's objects of torch: destructors of its stores and backends wait for threads of the parent."""
    for group, (_, store) in _c10d.distributed_c10d._world.pg_map.items():
        leak(group)
        leak(store)


os.register_at_fork(after_in_child=_leak_in_child)
