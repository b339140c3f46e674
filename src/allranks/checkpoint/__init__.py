"""Checkpoints that survive a kill, are written by all ranks, and can be read by any number of ranks.

::

    import allranks as dist
    from allranks import checkpoint

    state = {"model": model, "optimizer": optimizer, "epoch": epoch, "random": checkpoint.RandomState()}
    checkpoint.save(state, "checkpoints", step=1000, keep=3)

    if (last := checkpoint.latest("checkpoints", group=dist.group.WORLD)) is not None:
        checkpoint.load(last, into=state)

`save(obj, path)`, without ``step``, writes one object to one file.

A checkpoint is a folder: tensors in the safetensors format, and a manifest that lists every byte range with its hash. A
checkpoint is either complete or absent, whichever process is killed, and `load` rejects damaged data. If hosts have no
common folder, each host stores a share of the checkpoint. docs/checkpoints.md has the guide, the on-disk format, and
the guarantees.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks._base.errors import CheckpointError, UsageError
from allranks.checkpoint import background, loading, merging, one_file, saving, selection, single_file, verifying
from allranks.checkpoint.background import Saving
from allranks.checkpoint.folders import Info, PathLike, list_checkpoints
from allranks.checkpoint.participants import participants_of, single_process
from allranks.checkpoint.random_state import RandomState
from allranks.checkpoint.values import Shard

list = background.raise_earlier_failure_first(list_checkpoints)
merge = background.raise_earlier_failure_first(merging.merge)
verify = background.raise_earlier_failure_first(verifying.verify)

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
    """Save a state: with ``step`` as a checkpoint of all ranks in a folder, without ``step`` as one file.

    With ``step``, all ranks of the group call it, with the same ``step``. A value that is the same on several ranks is
    written once, and the work is distributed over the ranks. A value that differs between ranks (running means,
    generator states) is written once for each different value. Shards (DTensors, `Shard`) are written by the ranks that
    hold them. When it returns, on every rank, the checkpoint is complete and on the disk. If it raises, it raises on
    every rank, and earlier checkpoints are unchanged.

    Without ``step``, no other rank takes part. ``obj``, which may be any object that `torch.save` accepts, is written
    to the file ``path``, completely or not at all.

    Args:
        obj: Nested dicts, lists and tuples of tensors, NumPy arrays, numbers, strings, bytes, None; modules,
            optimizers, schedulers, and any object with ``state_dict`` and ``load_state_dict``.
        path: The folder of the checkpoints. It is created if it does not exist. If the ranks do not all see the same
            folder, the ranks that share a folder write a share of the checkpoint into it.
        step: Step of the training; the name of the checkpoint.
        keep: Number of the newest checkpoints that are kept; all others are removed. None: keep all.
        keep_every: With ``keep``: also keep the checkpoints whose step is a multiple of it.
        own: Paths in the state (``"replay"``, ``"model.cache"``) whose tensors every rank writes for itself, without a
            comparison. All other tensors are compared between ranks by a hash of their bytes.
        alike: Paths whose tensors the program guarantees to be the same on all ranks. They are compared by a sample of
            64 KiB each, which is faster. A difference outside the sample is lost: one rank's tensor is saved for all.
        group: The ranks. None: the world, or this process alone if there is no world. torch's groups are accepted, too.

    Returns:
        The folder of the checkpoint, or of this rank's share of it; None without ``step``.

    Raises:
        UsageError: A value in ``obj`` cannot be saved; or another job saves into the folder.
        CheckpointError: The checkpoint was not saved. The message names the ranks, the host, and the cause.
        OSError: Without ``step``: the file could not be written.

    Cost:
        Each rank reads its state once to compare it, writes its share, and waits for the disk. The ranks make five
        small exchanges.

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
                "checkpoint.save: keep, keep_every, own, alike and group apply only to checkpoints of all ranks.\n"
                "  Pass step=N to save a checkpoint of all ranks."
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
    """Save in the background, as `save` does: it returns when this rank's share is copied.

    At most one save is in progress; the next call waits for it. The process does not exit before the save has finished.

    Args:
        obj: As for `save`. It may be changed as soon as this call returns.
        path: As for `save`.
        step: As for `save`.
        keep: As for `save`.
        keep_every: As for `save`.
        own: As for `save`.
        alike: As for `save`.
        group: As for `save`.

    Returns:
        The save: ``wait()``, ``done()``.

    Raises:
        UsageError: As for `save`.
        CheckpointError: The previous save has failed, and ``wait`` was not called.

    Cost:
        One read of this rank's state to compare it, and a copy of its share into memory that is kept for later saves.
        The ranks make two small exchanges.
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
    """Load a file or a checkpoint that `save` wrote.

    To load a folder, all ranks of the group call it; their number may differ from the number that saved. Each rank
    reads the parts that it needs. Per-rank values are restored to the same rank number. A rank that did not exist
    when the checkpoint was saved receives rank 0's values. A rank receives the data that its folder lacks from ranks
    whose folders have it, at most 64 MiB at a time.

    Args:
        path: A file written by `save` or torch.save, or in the safetensors format; a checkpoint, or the result of
            `latest`; or a folder of checkpoints, of which the newest complete one is loaded. Damaged checkpoints are
            skipped with a warning.
        map_location: For a file: the device of the tensors, as in `torch.load`.
        weights_only: For a file: accept only tensors and plain containers. False runs any code that the file contains.
        into: The state to fill. It has the structure of the saved state, or of a part of it. Tensors, modules and
            optimizers keep their memory and devices. None: create a new state, with whole tensors on the CPU.
        step: For a folder of checkpoints: the step to load. None: the newest.
        group: As for `save`.

    Returns:
        The state.

    Raises:
        UsageError: ``into`` has a value that the checkpoint lacks, or a tensor of another shape or dtype. Nothing is
            filled.
        CheckpointError: The checkpoint does not exist, or a file is missing: nothing is filled. Or it is damaged: the
            message names file, tensor and rank, and parts of ``into`` may have been filled. If one rank fails, the
            call fails on all ranks.
        FileNotFoundError: ``path`` does not exist. With ``into``, ``step`` or ``group``, this is a CheckpointError.
        pickle.UnpicklingError: The file holds objects that ``weights_only=True`` rejects.

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
            raise UsageError(
                f"checkpoint.load: {os.fspath(path)!r} is a file, but step={step} applies only to folders of"
                " checkpoints.\n  Remove step, or pass a folder of checkpoints."
            )
        return one_file.load_file(path, map_location, weights_only, into)
    is_chosen = isinstance(path, Info) or not (into is None and step is None and group is None)
    if not is_chosen and not os.path.exists(path):
        background.settle()  # a save in progress may create the path
    # All ranks load a checkpoint, but one process may load a file. A missing path without other arguments may be meant
    # as a file, so raise here instead of waiting for the other ranks.
    if not is_chosen and not os.path.exists(path):
        raise FileNotFoundError(f"checkpoint.load: {os.fspath(path)!r} does not exist")
    background.settle()
    return loading.load_folder(path, into, step, participants_of(group))


def latest(folder: PathLike, *, group: Any = None, verify: bool = False) -> Info | None:
    """Return the newest complete checkpoint in a folder.

    Without ``group``, only this process reads its folder. With ``group``, all ranks of the group call it. Each rank
    gets the newest checkpoint that the ranks have together, with its own path of it. Hosts need not share a folder.

    Args:
        folder: The folder that was passed to `save`.
        group: The ranks, usually ``allranks.group.WORLD``; torch's groups are accepted, too. None: this process.
        verify: Read every byte, and skip damaged checkpoints with a warning that names them. False: check only names,
            sizes and the manifest; `load` detects other damage.

    Returns:
        The checkpoint, which `load` accepts; None if the folder does not exist or has no checkpoint.

    Raises:
        CheckpointError: Without ``group``: the newest checkpoint consists of shares, and not all of them are in this
            folder. Or a save in the background has failed, and no call has raised its error yet.
    """
    if group is None:
        background.raise_failure()
    else:
        background.settle()  # all ranks of the group wait, or none
    return selection.latest(folder, single_process() if group is None else participants_of(group), verify)


def _check_path(call: str, path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"checkpoint.{call}: the path has type {type(path).__name__}; expected a string or a path object.\n"
            f"  Pass the arguments in this order: {call}(state, path)."
        )


def __getattr__(name: str) -> Any:
    """Import the names for torch's distributed checkpoint on first use, because the import takes half a second."""
    if name not in ("StorageReader", "StorageWriter", "as_default"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from allranks.checkpoint import dcp, dcp_default

    for found in (dcp.StorageReader, dcp.StorageWriter, dcp_default.as_default):
        found.__module__ = __name__
        # Later accesses then find the name directly, and do not call this function.
        globals()[found.__name__] = found
    return globals()[name]


for _public in (Info, RandomState, Saving, Shard, list, merge, verify):
    _public.__module__ = __name__
# Pickle stores a function by its name, which must be the public one.
list.__name__ = list.__qualname__ = "list"
