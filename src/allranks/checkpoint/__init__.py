"""Checkpoints that survive a kill, are written by all ranks, and are read by any number of them.

::

    import allranks as dist
    from allranks import checkpoint

    state = {"model": model, "optimizer": optimizer, "epoch": epoch, "random": checkpoint.RandomState()}
    checkpoint.save(state, "checkpoints", step=1000, keep=3)

    if (last := checkpoint.latest("checkpoints", group=dist.group.WORLD)) is not None:
        checkpoint.load(last, into=state)

`save(obj, path)`, without ``step``, writes one object into one file, as ever.

A checkpoint is a folder: tensors in the safetensors format, and a manifest that names every byte with its hash. It is
there as a whole or not at all, whatever is killed, and nothing damaged is loaded. Where hosts have no folder in common,
each keeps a share of it. docs/checkpoints.md has the guide,
the form on disk, and what is promised.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks._base.errors import CheckpointError, UsageError
from allranks.checkpoint import background, choosing, loading, merging, one_file, saving, single_file, verifying
from allranks.checkpoint.background import Saving
from allranks.checkpoint.company import alone, company_of
from allranks.checkpoint.folders import Info, PathLike, list_checkpoints
from allranks.checkpoint.random_state import RandomState
from allranks.checkpoint.values import Shard

list = background.telling(list_checkpoints)
merge = background.telling(merging.merge)
verify = background.telling(verifying.verify)

if TYPE_CHECKING:
    from allranks.checkpoint.dcp import StorageReader, StorageWriter
    from allranks.checkpoint.dcp_default import as_default

__all__ = [
    "CheckpointError",
    "Info",
    "RandomState",
    "Saving",
    "Shard",
    "StorageReader",
    "StorageWriter",
    "as_default",
    "latest",
    "list",
    "load",
    "merge",
    "save",
    "save_async",
    "verify",
]


def save(
    obj: Any,
    path: PathLike,
    *,
    step: int | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    alike: Sequence[str] = (),
    group: Any = None,
) -> Path | None:
    """Saves a state: with ``step`` as a checkpoint of all ranks in a folder, without as one file.

    With ``step`` all ranks of the group call it, with the same ``step``. What several ranks have alike is written once,
    and the work is dealt out; what differs is written by each (running means, states of generators); shards (DTensors,
    `Shard`) are written by those that have them. When it returns, on every rank, the checkpoint is complete and on the
    disk. When it raises, it does so on every rank, and what was there before is unchanged.

    Without ``step``, no other rank is needed: ``obj``, whatever `torch.save` takes, is written to the file ``path``,
    all of it or not at all.

    Args:
        obj: nested dicts, lists and tuples of tensors, NumPy arrays, numbers, strings, bytes, None; modules,
            optimizers, schedulers, and whatever has ``state_dict`` and ``load_state_dict``.
        path: the folder of the checkpoints. It is made if it is not there. Where the ranks do not all see the same
            folder, those that see one write a share of the checkpoint into it.
        step: of the training; the name of the checkpoint.
        keep: so many of the newest checkpoints stay, the others are removed; None: all stay.
        keep_every: with ``keep``: those whose step is a multiple of it stay, too.
        own: paths in the state (``"replay"``, ``"model.cache"``) of which each rank's tensors are written, without
            comparing. All others are compared between ranks by a hash of their bytes.
        alike: paths of which the program promises that all ranks have the same: they are compared by a sample of 64 KiB
            each, which is faster. A difference beside it is lost: one rank's is saved for all.
        group: the ranks; None: the world, or this process alone where there is none. Torch's groups, too.

    Returns:
        The folder of the checkpoint, or of this rank's share of it; None without ``step``.

    Raises:
        UsageError: something in ``obj`` cannot be saved; another job saves into the folder.
        CheckpointError: it was not saved. Names the ranks, the host, and the cause.
        OSError: without ``step``: the file could not be written.

    Cost:
        each rank reads its state once to compare it, writes its share, and waits for the disk; five small exchanges
        between the ranks.

    Example:
        >>> import tempfile, torch  # in one process; on many ranks it is the same call
        >>> from allranks import checkpoint
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(3, 2)
        >>> path = checkpoint.save({"model": model, "epoch": 7}, folder, step=100)
        >>> checkpoint.latest(folder).step
        100
    """
    _check_path("save", path)
    if step is None:
        if keep is not None or keep_every is not None or own or alike or group is not None:
            raise UsageError(
                "checkpoint.save: keep, keep_every, own, alike and group are for checkpoints of all ranks: add step="
            )
        single_file.save(obj, path)
        return None
    background.settle()
    return saving.save(obj, path, step=step, keep=keep, keep_every=keep_every, own=own, alike=alike, group=group)


def save_async(
    obj: Any,
    path: PathLike,
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    alike: Sequence[str] = (),
    group: Any = None,
) -> Saving:
    """Saves as `save` does, in the background: it returns when this rank's share is copied.

    One save at a time goes on; another waits for it. The process does not end before the save has.

    Args:
        obj: as for `save`; it may be changed as soon as this returns.
        path: as for `save`.
        step: as for `save`.
        keep: as for `save`.
        keep_every: as for `save`.
        own: as for `save`.
        alike: as for `save`.
        group: as for `save`.

    Returns:
        The save: ``wait()``, ``done()``.

    Raises:
        UsageError: as for `save`.
        CheckpointError: the one before has failed, and ``wait`` was not called.

    Cost:
        one read of this rank's state to compare it, and a copy of its share into memory that is kept; two small
        exchanges between the ranks.
    """
    _check_path("save_async", path)
    return background.save_async(
        obj, path, step=step, keep=keep, keep_every=keep_every, own=own, alike=alike, group=group
    )


def load(
    path: PathLike,
    map_location: Any = "cpu",
    weights_only: bool = True,
    *,
    into: Any = None,
    step: int | None = None,
    group: Any = None,
) -> Any:
    """Loads what `save` wrote.

    Of a folder, all ranks of the group call it, however many they are: each reads what it needs. What ranks had each
    for itself is given to the rank with the same number, or is rank 0's where there was none. What the folder of a rank
    has not comes from ranks whose folders have it, at most 64 MiB at a time.

    Args:
        path: a file of `save`, of torch.save, or in the safetensors format; a checkpoint, or what `latest` gave; or a
            folder of checkpoints, of which the newest is taken that is whole. Others are left out with a warning.
        map_location: of a file: where tensors go, as in `torch.load`.
        weights_only: of a file: accept only tensors and plain containers. False runs whatever code the file holds.
        into: what is filled. It has the structure of what was saved, or of a part of it; tensors, modules
            and optimizers keep their memory and devices. None: a new state, with whole tensors on the CPU.
        step: of a folder of checkpoints: which one; None: the newest.
        group: as for `save`.

    Returns:
        The state.

    Raises:
        UsageError: ``into`` has what the checkpoint has not, or tensors of another shape or dtype. Nothing is filled.
        CheckpointError: there is no such checkpoint, or a file is missing: nothing is filled. Or it is damaged: names
            file, tensor and rank; parts of ``into`` may have been filled. A failure of one rank is one of all.
        FileNotFoundError: there is nothing at ``path``.
        pickle.UnpicklingError: the file holds objects that ``weights_only=True`` refuses.

    Example:
        >>> import tempfile, torch  # in one process; on many ranks it is the same call
        >>> from allranks import checkpoint
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2), "epoch": 7}
        >>> path = checkpoint.save(state, folder, step=100)
        >>> mine = checkpoint.load(folder, into={"weight": torch.zeros(2), "epoch": 0})
        >>> mine["weight"], mine["epoch"]
        (tensor([1., 1.]), 7)
    """
    if os.path.isfile(path):
        if step is not None:
            raise UsageError(f"checkpoint.load: {os.fspath(path)!r} is a file; step is for folders of checkpoints")
        return one_file.load_file(path, map_location, weights_only, into)
    is_told = isinstance(path, Info) or not (into is None and step is None and group is None)
    if not is_told and not os.path.exists(path):
        background.settle()  # a save that has just begun may make it
    if not is_told and not os.path.exists(path):  # a file, for all that is known, which other ranks do not ask for
        raise FileNotFoundError(f"checkpoint.load: there is nothing at {os.fspath(path)!r}")
    background.settle()
    return loading.load_folder(path, into, step, company_of(group))


def latest(folder: PathLike, *, group: Any = None, verify: bool = False) -> Info | None:
    """The newest complete checkpoint in a folder.

    Without ``group``, this process looks alone. With one, all ranks of it call this, and get the newest checkpoint that
    they have together, each with its own path of it: hosts need not see the same folder.

    Args:
        folder: where `save` was told to save.
        group: the ranks, mostly ``allranks.group.WORLD``; torch's groups, too. None: this process.
        verify: read every byte, and leave out what is damaged, with a warning that names it. False: only names, sizes
            and the manifest are looked at; `load` finds the rest.

    Returns:
        The checkpoint, which `load` takes; None if there is none, or no such folder.

    Raises:
        CheckpointError: without ``group``: the newest consists of shares, and not all are in this folder. Or a save in
            the background has failed, and nobody was told.
    """
    if group is None:
        background.raise_failure()
    else:
        background.settle()  # on all ranks, or on none
    return choosing.latest(folder, alone() if group is None else company_of(group), verify)


def _check_path(call: str, path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"checkpoint.{call}: a {type(path).__name__} is no path; the order is {call}(state, path)")


def __getattr__(name: str) -> Any:
    """What is for torch's distributed checkpoint, whose import takes half a second."""
    if name not in ("StorageReader", "StorageWriter", "as_default"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from allranks.checkpoint import dcp, dcp_default

    for found in (dcp.StorageReader, dcp.StorageWriter, dcp_default.as_default):
        found.__module__ = __name__
        globals()[found.__name__] = found
    return globals()[name]


for _public in (Info, RandomState, Saving, Shard, list, merge, verify):
    _public.__module__ = __name__
list.__name__ = list.__qualname__ = "list"
