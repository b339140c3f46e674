"""Writer and reader of allranks's format for torch's distributed checkpoint (``torch.distributed.checkpoint``).

torch's planners decide which rank writes and reads which part, and torch exchanges plans and errors between the ranks.
When the coordinator has all plans, it takes the lock and creates the partial folder. Each rank writes its part. When
the coordinator has all results, it completes the checkpoint. torch pickles values that are not tensors; the writer puts
the original object into the manifest instead.

This module is imported when one of its classes is first used: the import of torch's module takes half a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import shutil
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.futures import Future

from allranks._base.errors import CheckpointError, UsageError
from allranks._call.bytes import view_of
from allranks.checkpoint import background, folder_claims, folders, layout, loading, part_descriptions, parts, saving
from allranks.checkpoint.dcp_names import leaves_of, nested
from allranks.checkpoint.manifest import Manifest, ManifestFile, Piece, Saved, Writer, dtype_of
from allranks.checkpoint.participants import participants_of, this_process
from allranks.checkpoint.selection import select_local_checkpoint
from allranks.checkpoint.values import Shard, Tree, flatten, require_dense, tensors_in

__all__ = ["StorageReader", "StorageWriter"]


@dataclasses.dataclass(frozen=True)
class _Written:
    """Result of a rank's write, sent to the coordinator.

    Attributes:
        process: Host and pid.
        file: None if the rank had no tensor to write.
        descriptions: The tensors, and parts of tensors, in the file.
        positions: For each, its first byte in the file and the hashes of its blocks.
        trees: Trees of the values that are not tensors, by name.
        empty: Tensors without elements in these trees. They have no bytes in a file.
    """

    process: tuple[str, int]
    file: ManifestFile | None
    descriptions: list[layout.PartDescription]
    positions: list[tuple[int, bytes]]
    trees: dict[str, Tree]
    empty: list[layout.PartDescription]


class StorageWriter(storage.StorageWriter):
    """Writes checkpoints for ``torch.distributed.checkpoint.save`` and ``async_save``.

    ::

        dcp.save(state_dict, storage_writer=checkpoint.StorageWriter("checkpoints", step=1000))

    The result is the same kind of checkpoint that `save` writes: `latest`, `list`, `verify` and `load` accept it. Each
    save needs a new writer.

    Args:
        path: The folder of the checkpoints, which all ranks must see. It is created if it does not exist.
        step: Step of the training; the name of the checkpoint.
        keep: Number of the newest checkpoints that are kept; all others are removed. None: keep all.
        keep_every: With ``keep``: also keep the checkpoints whose step is a multiple of it.

    Raises:
        UsageError: A number is invalid. While saving: a value cannot be saved in a checkpoint; or another job saves
            into the folder.
        CheckpointError: While saving: the checkpoint was not saved. The message names the rank, the host, and the
            cause.
    """

    def __init__(
        self, path: folders.PathLike, *, step: int, keep: int | None = None, keep_every: int | None = None
    ) -> None:
        saving.check_numbers("checkpoint.StorageWriter", step, keep, keep_every)
        self._folder = Path(os.path.realpath(path))
        self._step, self._keep, self._keep_every = step, keep, keep_every
        self._rank = 0  # rank in the group that saves
        self._partial: Path | None = None  # on the coordinator, during a save

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. ``checkpoint_id``: a folder of checkpoints that replaces the writer's folder."""
        if checkpoint_id is not None:
            self._folder = Path(os.path.realpath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank, as torch's method does.

        Raises:
            UsageError: Collectives are disabled, so no rank could combine the parts into one checkpoint.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError("checkpoint.StorageWriter requires use_collectives=True: all ranks write one checkpoint")
        self._rank = kwargs.get("rank", participants_of().rank)
        background.raise_failure()

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Take the lock and create the partial folder, which all ranks must see."""
        with self._disk_errors_converted():
            self._partial = _open(self, self._folder, self._step)
        return [dataclasses.replace(plan, storage_data=(rank, str(self._partial))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[storage.WriteResult]]:
        """Write this rank's part, and wait until it is on the disk."""
        rank, partial = self._rank_and_folder(plan)
        with self._disk_errors_converted():
            written = _write(partial, self._step, rank, plan, planner)
        nbytes = 0 if written.file is None else written.file.nbytes
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result([storage.WriteResult(torchs.MetadataIndex("", index=rank), nbytes, written)])
        return done

    def finish(self, metadata: torchs.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Combine the parts into a checkpoint."""
        assert self._partial is not None
        try:
            written = [result[0].storage_data for result in results]
            manifest = _manifest(self._step, metadata, written)
            with self._disk_errors_converted():
                # The names of the parts must be on the disk before the manifest that lists them.
                folders.sync_folder(self._partial)
                path, lock = folders.complete(self._partial, manifest), _opened[self._folder].lock
            # After the rename: old checkpoints are removed only when the new one is complete.
            remarks = lock.remarks + folders.tidy(path, self._keep, self._keep_every, lock.run)
            folders.warn_of_remarks(f"checkpoint.StorageWriter: step {self._step} is complete in {path}", remarks)
        finally:
            _close(self._folder, self._partial)
            self._partial = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a path."""
        return _is_path(checkpoint_id)

    @contextlib.contextmanager
    def _disk_errors_converted(self) -> Iterator[None]:
        """Convert a disk error to the error of a failed save, which names the rank and the folder."""
        try:
            yield
        except OSError as error:
            raise saving.save_failed_error(
                "checkpoint.StorageWriter", self._step, self._folder, [self._rank], this_process(),
                saving.failure_text(error),
            ) from error  # fmt: skip

    def _rank_and_folder(self, plan: plans.SavePlan) -> tuple[int, Path]:
        """Return the rank and the partial folder.

        A planner that caches plans returns the plan of an earlier save, whose folder no longer exists. In this case the
        only partial folder of the step is the right one.
        """
        rank, announced = plan.storage_data
        partial = Path(announced)
        if partial.parent == self._folder and partial.is_dir():
            return rank, partial
        found = folders.partials(self._folder, self._step)
        if len(found) != 1:
            raise CheckpointError(
                f"checkpoint.StorageWriter: rank {rank} does not see {announced}, which the coordinator of the save has"
                " created.\n  Use a folder that all ranks see."
            )
        return rank, found[0]


# Writing.


@dataclasses.dataclass
class _OpenDcpSave:
    """A save that the coordinator has begun.

    Attributes:
        partial: Its partial folder.
        lock: Lock of the folder of checkpoints.
        held: Closing it ends the save and releases the lock.
        thread: Thread that began the save.
    """

    partial: Path
    lock: folders.HeldFolder
    held: contextlib.ExitStack
    thread: threading.Thread


_opened: dict[Path, _OpenDcpSave] = {}
# Reentrant: a garbage collection inside `_open` may finalize an earlier writer, whose `_close` takes this lock, too.
_guard = threading.RLock()


def _open(writer: StorageWriter, folder: Path, step: int) -> Path:
    """Begin a save, and remove the remains of an earlier save of this process.

    torch does not notify the coordinator that another rank has failed, and the remaining ranks may still write. The
    remains of a failed save are therefore removed here, or when its writer is finalized.
    """
    with _guard:
        if (earlier := _opened.get(folder)) is not None:
            # An open save of this thread, or of a thread that has ended, has failed.
            if earlier.thread is not threading.current_thread() and earlier.thread.is_alive():
                raise UsageError(
                    f"checkpoint.StorageWriter: this process is already saving into {folder}.\n"
                    "  Wait until that save has finished."
                )
            _discard(folder)
        with contextlib.ExitStack() as held:
            lock = held.enter_context(folders.hold_folder(folder, folder_claims.run_id()))
            partial = folders.new_partial(folder, step)
            _opened[folder] = _OpenDcpSave(partial, lock, held.pop_all(), threading.current_thread())
    weakref.finalize(writer, _close, folder, partial)
    return partial


def _close(folder: Path, partial: Path) -> None:
    """End a save that has not ended: remove its partial folder and release the lock."""
    with _guard:
        # The finalizer of an earlier writer must not end the current save into the same folder.
        if folder in _opened and _opened[folder].partial == partial:
            _discard(folder)


def _discard(folder: Path) -> None:
    if (opened := _opened.pop(folder, None)) is None:
        return
    # Remove before the lock is released: after that, another process may sweep the same folder.
    shutil.rmtree(opened.partial, ignore_errors=True)
    opened.held.close()


def _write(partial: Path, step: int, rank: int, plan: plans.SavePlan, planner: plans.SavePlanner) -> _Written:
    sources: dict[str, Callable[[], Tensor]] = {}
    jobs: list[layout.SaveJob] = []
    trees: dict[str, Tree] = {}
    empty: list[layout.PartDescription] = []

    def add(description: layout.PartDescription, source: Callable[[], Tensor]) -> None:
        job = layout.SaveJob(description, (), (rank,), rank)
        if job.key in sources:
            raise UsageError(
                f"checkpoint.StorageWriter: two tensors of the state have the name {job.key!r}.\n"
                "  Rename one of them in the state."
            )
        sources[job.key] = source
        if description.nbytes:
            jobs.append(job)
        else:
            empty.append(description)

    for item in plan.items:
        if item.type == plans.WriteItemType.BYTE_IO:
            flat = flatten(_object(item, planner), item.index.fqn)
            if isinstance(flat.tree, dict) and not flat.tree.keys().isdisjoint(("dict", "items")):
                raise UsageError(
                    f"checkpoint.StorageWriter: {item.index.fqn!r} of the state is a dict, which it cannot store.\n"
                    "  Save with a planner that flattens dicts: DefaultSavePlanner(flatten_state_dict=True)."
                )
            trees[item.index.fqn] = flat.tree
            for name, tensor in flat.tensors.items():
                part, offsets, shape = part_descriptions.local_part(name, tensor)
                add(_describe(name, part.dtype, shape, offsets, tuple(part.shape)), _constant(part))
        else:
            data = item.tensor_data
            assert data is not None
            offsets, part_shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            description = _describe(item.index.fqn, data.properties.dtype, tuple(data.size), offsets, part_shape)
            add(description, _resolution(item, planner, description))
    layout.set_positions(jobs)
    if not jobs:
        return _Written(this_process(), None, [], [], trees, empty)
    file, hashes = parts.write_part(partial, jobs, step, rank, _views(sources[job.key] for job in jobs))
    positions = [(file.head + job.begin, found) for job, found in zip(jobs, hashes, strict=True)]
    return _Written(this_process(), file, [job.description for job in jobs], positions, trees, empty)


def _describe(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...], part: tuple[int, ...]
) -> layout.PartDescription:
    return layout.PartDescription(name, str(dtype).removeprefix("torch."), dtype.itemsize, shape, offsets, part, 0)


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _resolution(
    item: plans.WriteItem, planner: plans.SavePlanner, description: layout.PartDescription
) -> Callable[[], Tensor]:
    """Return a function that returns the planner's tensor.

    It is called just before the write, because a planner may create the tensor only then.
    """

    def resolve() -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        tensor = tensor.detach()
        require_dense(description.name, tensor)
        if tensor.dtype != dtype_of(description.dtype) or tuple(tensor.shape) != description.part:
            raise UsageError(
                f"checkpoint.StorageWriter: {type(planner).__name__}.resolve_data returned {description.name!r} as"
                f" {tensor.dtype} {list(tensor.shape)}, but its plan has torch.{description.dtype}"
                f" {list(description.part)}.\n  Return a tensor of the dtype and shape in the plan."
            )
        return tensor

    return resolve


def _views(sources: Iterator[Callable[[], Tensor]]) -> Iterator[memoryview]:
    for source in sources:
        plain = part_descriptions.contiguous_on_cpu(source())
        yield view_of(plain)


def _object(item: plans.WriteItem, planner: plans.SavePlanner) -> Any:
    """Return a value that is not a tensor, as it was before the planner pickled it."""
    # A method of torch's default planner. Other planners only return pickled bytes.
    lookup = getattr(planner, "lookup_object", None)
    if lookup is not None:
        return lookup(item.index)
    pickled = planner.resolve_data(item)
    assert isinstance(pickled, io.BytesIO)
    pickled.seek(0)
    try:
        return torch.load(pickled, weights_only=True)
    except Exception as error:
        raise UsageError(
            f"checkpoint.StorageWriter: {item.index.fqn!r} of the state was pickled by {type(planner).__name__}, and a"
            f" checkpoint cannot store it: {error!s:.200}\n"
            "  Save with DefaultSavePlanner, or replace this value by tensors, numbers, strings, lists or dicts."
        ) from error


def _manifest(step: int, metadata: torchs.Metadata, written: Sequence[_Written]) -> Manifest:
    files: list[ManifestFile] = []
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    trees: dict[str, Tree] = {}
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, torchs.TensorStorageMetadata):
            kinds[name] = (str(value.properties.dtype).removeprefix("torch."), tuple(value.size))
            trees[name] = {"tensor": name}
    own = set(kinds)
    for each in written:
        trees.update(each.trees)
        for description in each.empty:
            # A tensor of the plan without elements on this rank may have elements on another: its shape is known.
            kinds.setdefault(description.name, (description.dtype, description.shape))
        if each.file is None:
            continue
        for description, (begin, hashes) in zip(each.descriptions, each.positions, strict=True):
            kinds.setdefault(description.name, (description.dtype, description.shape))
            pieces.setdefault(description.name, []).append(
                Piece(len(files), begin, description.offsets, description.part, hashes)
            )
        files.append(each.file)
    tensors = []
    for name, (dtype, shape) in sorted(kinds.items()):
        found = sorted(pieces.get(name, []), key=lambda piece: piece.offsets)
        if (covered := sum(math.prod(piece.shape) for piece in found)) != math.prod(shape):
            raise UsageError(
                f"checkpoint.StorageWriter: the parts of tensor {name!r} do not cover its shape {list(shape)}:"
                f" {covered} of {math.prod(shape)} elements"
                + (
                    ".\n  Save with all ranks that have a part of the tensor."
                    if name in own
                    else "; another value of the state has the same name.\n  Rename one of them in the state."
                )
            )
        tensors.append(Saved(name, dtype, shape, tuple(found)))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    order = dict.fromkeys([name for name in paths if name in trees] + list(trees))  # the order of the program's dicts
    tree = nested((tuple(paths.get(name, (name,))), trees[name]) for name in order)
    writers = [Writer(*each.process, 0) for each in written]
    return saving.new_manifest(step, writers, files, tensors, [tree])


# Reading.


class StorageReader(storage.StorageReader):
    """Reads checkpoints for ``torch.distributed.checkpoint.load``, written by `save` or by `StorageWriter`.

    ::

        dcp.load(state_dict, storage_reader=checkpoint.StorageReader("checkpoints"))

    Each block is checked before it is used. Per-rank tensors are restored to the same rank number.

    Args:
        path: A checkpoint; or a folder of checkpoints, of which the newest is read.
        step: For a folder of checkpoints: the step to load. None: the newest.

    Raises:
        CheckpointError: While loading: the checkpoint does not exist, or a file is missing: nothing is filled. Or it is
            damaged: the message names file, tensor and rank, and parts of the state may have been filled.
    """

    def __init__(self, path: folders.PathLike, *, step: int | None = None) -> None:
        self._path, self._step = Path(path), step
        self._folder: Path | None = None
        self._reader: loading.BlockReader | None = None
        self._leaves: dict[str, tuple[tuple[str | int, ...], Tree]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load. ``checkpoint_id``: a path that replaces the path of the reader."""
        self._close()
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> torchs.Metadata:
        """Read the manifest, and return it as torch's metadata."""
        rank = participants_of().rank
        try:
            return self._metadata(rank)
        except (CheckpointError, OSError) as error:
            # torch 2.10 discards an Exception that is raised here and reports "metadata is None". A CheckpointException
            # is no Exception, so torch reports it.
            raise CheckpointException("read_metadata", {rank: (error, traceback.StackSummary())}) from error

    def _metadata(self, rank: int) -> torchs.Metadata:
        self._close()
        selected = select_local_checkpoint(self._path, self._step)
        self._folder = selected.folder
        self._reader = loading.BlockReader(selected, rank)
        self._leaves = leaves_of(self._reader.manifest.tree(rank))
        entries: dict[str, Any] = {}
        for name, (_, leaf) in self._leaves.items():
            saved = self._tensor(leaf)
            entries[name] = torchs.BytesStorageMetadata() if saved is None else _described(saved)
        return torchs.Metadata(entries, planner_data={name: path for name, (path, _) in self._leaves.items()})

    def set_up_storage_reader(self, metadata: torchs.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; torch requires this method."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """Open the files that this rank needs. An error here fails the load on all ranks before any value is filled."""
        assert self._folder is not None
        self._open(plan)
        return dataclasses.replace(plan, storage_data=self._folder.name)

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Check that all ranks read the same checkpoint."""
        names = [plan.storage_data for plan in plans]
        if len(set(names)) > 1:
            listed = ", ".join(f"rank {rank}: {name}" for rank, name in list(enumerate(names))[:8])
            raise CheckpointError(
                f"checkpoint.StorageReader: the ranks have found different checkpoints in {self._path} ({listed}),"
                " because a job is saving into it.\n  Select one with step=."
            )
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Read and check the data that this rank needs."""
        assert self._reader is not None
        # Closes the files when the load ends. `reset` closes those of a load that never reached this point.
        with self._reader as reader:
            self._open(plan)  # a planner may have changed the plan
            for item in plan.items:
                _, leaf = self._leaves[item.storage_index.fqn]
                if item.type == plans.LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(reader.build(leaf)))
                    continue
                saved, target = self._tensor(leaf), planner.resolve_tensor(item)
                assert saved is not None
                try:
                    reader.read(saved, Shard(target.detach(), _begin_of(item), saved.shape))
                except CheckpointError as error:
                    raise CheckpointError(f"{error}\n  {loading.check_hint(reader.where)}") from error.__cause__
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a path."""
        return _is_path(checkpoint_id)

    def _open(self, plan: plans.LoadPlan) -> None:
        assert self._reader is not None
        for item in plan.items:
            _, leaf = self._leaves[item.storage_index.fqn]
            if item.type == plans.LoadItemType.BYTE_IO:
                for name in tensors_in(leaf):
                    self._reader.open_for(self._reader.find(name), None)
                continue
            saved = self._tensor(leaf)
            assert saved is not None
            self._reader.open_box(saved, _begin_of(item), tuple(item.lengths))

    def _close(self) -> None:
        """End an earlier load, which may have failed before it has read anything."""
        if self._reader is not None:
            self._reader.__exit__()
            self._reader = None

    def _tensor(self, leaf: Tree) -> Saved | None:
        assert self._reader is not None
        return self._reader.find(leaf["tensor"]) if isinstance(leaf, dict) and "tensor" in leaf else None


def _begin_of(item: plans.ReadItem) -> tuple[int, ...]:
    """Return the position in the tensor at which the read begins."""
    assert item.storage_index.offset is not None
    return tuple(a + b for a, b in zip(item.storage_index.offset, item.storage_offsets, strict=True))


def _described(saved: Saved) -> torchs.TensorStorageMetadata:
    chunks = [torchs.ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in saved.pieces]
    return torchs.TensorStorageMetadata(
        torchs.TensorProperties(dtype=dtype_of(saved.dtype)), torch.Size(saved.shape), chunks
    )


def _pickled(value: Any) -> io.BytesIO:
    """Return a value in the form that torch's planners expect. It is pickled here, in memory; no file is unpickled."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _is_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    return "://" not in os.fspath(checkpoint_id)
