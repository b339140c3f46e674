"""Starts the watcher of a process when its default process group is created.

torch loads ``allranks._plugin`` when it is imported, which calls ``install``. The program needs no change.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks._watch.watcher import Watcher

__all__ = ["install", "recorder_is_enabled_here"]

_WATCH = "ALLRANKS_WATCH"  # `_cluster.env` declares it; torch's import should not load that module

recorder_is_enabled_here: bool = False
"""The watcher, and not the user, has enabled torch's Flight Recorder in this process."""

_watcher: Watcher | None = None
_started = 0


def install(c10d: Any) -> None:
    """Replace the function with which torch creates process groups by one that starts the watcher if it is enabled.

    Args:
        c10d: The module ``torch.distributed.distributed_c10d``.
    """
    if os.environ.get(_WATCH, "0") not in ("", "0"):
        # A late import: without the variable, torch's import loads nothing for the watcher.
        from allranks._trace.offered_stacks import offer_stacks

        # Other ranks can then request the stacks of a rank that never reaches its process group.
        offer_stacks()
    create = c10d._new_process_group_helper

    @functools.wraps(create)
    def create_watched(
        group_size: int, group_rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kw: Any
    ) -> Any:
        # Read at each call: the launcher imports torch once, before it forks its ranks.
        if os.environ.get(_WATCH, "0") in ("", "0"):
            return create(group_size, group_rank, ranks, backend, store, *args, **kw)
        # A program may create another world beside its default group, with a store of its own.
        if not ranks and not c10d.is_initialized():
            _start(c10d, group_rank, group_size, store)
        name = str(args[0] if args else kw.get("group_name", ""))
        watcher = _watcher
        if watcher is None:
            return create(group_size, group_rank, ranks, backend, store, *args, **kw)
        watcher.evidence.begin_creation(name, ranks, threading.get_ident())
        try:
            return create(group_size, group_rank, ranks, backend, store, *args, **kw)
        finally:
            watcher.evidence.end_creation(name)

    c10d._new_process_group_helper = create_watched


def _start(c10d: Any, rank: int, size: int, store: Any) -> None:
    global _watcher, _started, recorder_is_enabled_here
    from allranks._cluster.env import ABORT_AFTER, WATCH_FOLDER, notice_seconds, read_seconds
    from allranks._watch.messages import record_messages
    from allranks._watch.watcher import Watcher

    # torch reads it when the first group is created. 0 would record nothing.
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
        recorder_is_enabled_here = True
    if _watcher is not None:
        _watcher.stop()
        _watcher = None
    limit_s = notice_seconds(os.environ)
    if limit_s <= 0 or size < 2:
        return
    try:
        own = store.clone()
    except RuntimeError:  # a store that is written in Python has no second connection
        return
    record_messages(c10d)
    abort_s = read_seconds(os.environ, ABORT_AFTER) or 0.0
    _watcher = Watcher(rank, size, own, limit_s, abort_s, os.environ.get(WATCH_FOLDER, ""), _started)
    _started += 1
    _watcher.start()
