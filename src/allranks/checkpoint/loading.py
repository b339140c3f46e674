"""Loading a checkpoint into any layout, by byte ranges. All data is checked; damaged data raises an error.

Each rank reads the part of each tensor that it needs. It reads the rows, in the first dimension, of the pieces that its
part intersects. A state that is filled keeps its memory. Of DTensors and ``Shard``, a rank reads only its own part.

No value is filled before the load can succeed on all ranks: all shapes are compared, and all files are open.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from allranks._base.errors import CheckpointError
from allranks._call.bytes import in_huge_pages, view_of
from allranks.checkpoint import folders, parts
from allranks.checkpoint.background import duplicate_participants
from allranks.checkpoint.manifest import MANIFEST, Manifest, Piece, Saved, dtype_of
from allranks.checkpoint.part_descriptions import local_part
from allranks.checkpoint.participants import Participants, run_on_all_ranks
from allranks.checkpoint.remote_files import TransferRounds
from allranks.checkpoint.restoring import StateRestorer
from allranks.checkpoint.selection import SelectedCheckpoint, select_checkpoint
from allranks.checkpoint.values import Shard, Tree, unflatten

__all__ = ["BlockReader", "load_folder", "load_as_rank"]

_CHUNK = 64 << 20  # bytes per read if the data is copied to its destination


def load_folder(path: folders.PathLike, into: Any, step: int | None, participants: Participants) -> Any:
    """Read a checkpoint. All ranks call it.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        into: The state to fill. None: create a new one.
        step: For a folder: the step to load. None: the newest.
        participants: The ranks.

    Returns:
        The state: ``into``, or the new one.

    Raises:
        UsageError: ``into`` has a value that the checkpoint lacks, or a tensor of another shape or dtype. On all ranks.
        CheckpointError: There is no checkpoint, it is damaged, or a file cannot be read. On all ranks.
    """
    try:
        selected = select_checkpoint(path, step, participants)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load: {error}") from error.__cause__
    try:
        return _load(selected, into, participants)
    except CheckpointError as error:
        if selected.named:
            raise CheckpointError(f"{error}\n  {check_hint(str(selected.folder))}") from error.__cause__
        damaged = error
    try:  # `into` may be partially filled: an older checkpoint fills all of it
        older = select_checkpoint(path, None, participants, verified=True)
    except CheckpointError:
        # Report the damage of this one, the newest.
        raise CheckpointError(
            f"{damaged}\n  No checkpoint in {path} is intact. Restore one from a backup."
        ) from damaged.__cause__
    if older.folder == selected.folder:
        raise damaged  # every byte is intact, so another checkpoint would fail in the same way
    return _load(older, into, participants)


def check_hint(where: str) -> str:
    """Return the action for the error of a load from a checkpoint."""
    # Not every failure is damage: memory may be short, or a load_state_dict may reject the state. So it suggests a
    # check, and no removal.
    return (
        f"To check this checkpoint, run: allranks checkpoint verify {where}\n"
        "  To find the newest intact one, call checkpoint.latest(folder, verify=True)."
    )


def _load(selected: SelectedCheckpoint, into: Any, participants: Participants) -> Any:
    if selected.is_everywhere(participants.size):
        with BlockReader(selected, participants.rank) as reader:
            # No rank changes its state before all ranks are prepared.
            restorer = run_on_all_ranks(participants, lambda: _prepared(reader, into, participants.rank))
            return run_on_all_ranks(participants, restorer.finish)
    # A separate group, so that the exchanges do not mix with calls of the program.
    rounds = TransferRounds(selected, duplicate_participants(participants))
    with BlockReader(selected, participants.rank, rounds) as reader:
        restorer = run_on_all_ranks(
            participants, lambda: StateRestorer(reader, into, reader.manifest.tree(participants.rank))
        )
        try:
            restorer.build()
            state = restorer.finish()
        except Exception as error:
            # The other ranks wait in their rounds for this rank, so send them the error.
            rounds.finish(error)
            raise
        rounds.finish()
        return state


def load_as_rank(
    selected: SelectedCheckpoint, into: Any, rank: int, progress: Callable[[int], object] | None = None
) -> Any:
    """Read a checkpoint as one rank, whose files are all in visible folders. ``progress``: see ``BlockReader``."""
    with BlockReader(selected, rank, progress=progress) as reader:
        return _prepared(reader, into, rank).finish()


def _prepared(reader: BlockReader, into: Any, rank: int) -> StateRestorer:
    restorer = StateRestorer(reader, into, reader.manifest.tree(rank))
    restorer.build()
    return restorer


class BlockReader:
    """A checkpoint that is being read. Its files are opened when they are needed.

    Args:
        selected: The checkpoint.
        rank: Rank whose state is read.
        rounds: Provides the files that this rank does not see.
        progress: Receives the number of bytes of each read.
    """

    def __init__(
        self,
        selected: SelectedCheckpoint,
        rank: int,
        rounds: TransferRounds | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._progress = progress
        self._folder, self._local_folders, self._rounds = selected.folder, selected.local_folders, rounds
        self.manifest: Manifest = selected.manifest
        self._tensors = self.manifest.tensors_of(rank)
        self._open = contextlib.ExitStack()
        self._files: dict[int, parts.Source] = {}
        self._built_tensors: dict[str, Tensor] = {}

    @property
    def where(self) -> str:
        """The checkpoint, for error messages."""
        return str(self._folder)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    def build(self, tree: Tree, like: Mapping[str, Any] | None = None) -> Any:
        """Build a new state.

        Args:
            tree: Tree of the state.
            like: DTensors by name. The tensor of this name gets the same layout.
        """
        return unflatten(
            tree,
            lambda name: self.tensor(name, None if like is None else like.get(name)),
            where=str(self._folder / MANIFEST),
        )

    def tensor(self, name: str, like: Any = None) -> Tensor:
        """Return a new CPU tensor, or a DTensor with the layout of `like`. The same name returns the same object."""
        if name not in self._built_tensors:
            saved = self.find(name)
            made = self._empty(saved, like)
            self.read(saved, made)
            self._built_tensors[name] = made
        return self._built_tensors[name]

    def _empty(self, saved: Saved, like: Any) -> Tensor:
        dtype = dtype_of(saved.dtype)
        try:
            if _is_like(saved, like):
                return torch.empty_like(like, dtype=dtype)
            return in_huge_pages(torch.empty(saved.shape, dtype=dtype, device="cpu"))
        # torch reports a failed allocation as a RuntimeError.
        except (RuntimeError, MemoryError) as error:
            nbytes = math.prod(saved.shape) * dtype.itemsize
            raise CheckpointError(
                f"not enough memory for tensor {saved.name!r} ({nbytes} bytes): {error}\n"
                "  Free memory, or pass into= with tensors to fill."
            ) from error

    def find(self, name: object) -> Saved:
        """Return the description of a tensor."""
        saved = self._tensors.get(name) if isinstance(name, str) else None
        if saved is None:
            raise CheckpointError(f"{self._folder / MANIFEST} is damaged: it has no tensor {str(name)[:200]!r}")
        return saved

    def open_for(self, saved: Saved, target: Tensor | Shard | None) -> None:
        """Open the files of a tensor, or of the part of it that a target holds. None: of the whole tensor."""
        if target is None:
            self.open_box(saved, (0,) * len(saved.shape), saved.shape)
        else:
            part, offsets, _ = local_part(saved.name, target)
            self.open_box(saved, offsets, tuple(part.shape))

    def open_box(self, saved: Saved, offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Open the files of the part of a tensor that begins at ``offsets``."""
        for piece in saved.pieces:
            if _intersection(piece, offsets, shape) is not None:
                self._file(piece.file)

    def read(self, saved: Saved, into: Tensor | Shard) -> None:
        """Fill a tensor of the same shape, or the part of it that a shard or DTensor holds."""
        part, offsets, _ = local_part(saved.name, into)
        with torch.no_grad():
            for piece in saved.pieces:
                self._read_piece(saved, piece, part, offsets)

    def _read_piece(self, saved: Saved, piece: Piece, part: Tensor, offsets: tuple[int, ...]) -> None:
        if (intersection := _intersection(piece, offsets, tuple(part.shape))) is None:
            return
        low, high = intersection
        dtype = dtype_of(saved.dtype)
        target = part[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
        # A tensor without dimensions counts as one row.
        first, last = (low[0] - piece.offsets[0], high[0] - piece.offsets[0]) if low else (0, 1)
        row = math.prod(piece.shape[1:]) * dtype.itemsize
        source = self._file(piece.file)
        whole_rows = tuple(target.shape[1:]) == tuple(piece.shape[1:])
        # A conjugate or negative view differs from its bytes, so it needs copy_.
        lazy = target.is_conj() or target.is_neg()
        # Read directly into the memory of the tensor if its bytes are contiguous in the piece.
        if whole_rows and target.is_cpu and target.dtype == dtype and target.is_contiguous() and not lazy:
            view = view_of(target, writable=True)
            parts.read_rows(source, self.manifest, saved, piece, first * row, last * row, view)
            return
        inner = tuple(slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], piece.offsets[1:], strict=True))
        # In chunks, so that the extra memory is limited by _CHUNK (or one row).
        step = max(1, _CHUNK // row)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            rows = torch.empty((end - begin, *piece.shape[1:]) if low else (), dtype=dtype, device="cpu")
            view = view_of(rows, writable=True)
            parts.read_rows(source, self.manifest, saved, piece, begin * row, end * row, view)
            if low:
                target[begin - first : end - first].copy_(rows[(slice(None), *inner)])
            else:
                target.copy_(rows)

    def _file(self, number: int) -> parts.Source:
        if number not in self._files:
            file = self.manifest.files[number]
            if file.share in self._local_folders:
                self._files[number] = self._open.enter_context(parts.open_part(self._local_folders[file.share], file))
            else:
                assert self._rounds is not None
                self._files[number] = self._rounds.file(number)
            if self._progress is not None:
                self._files[number] = _ReportingSource(self._files[number], self._progress)
        return self._files[number]


class _ReportingSource:
    """A ``parts.Source`` that reports how many bytes are read."""

    def __init__(self, source: parts.Source, progress: Callable[[int], object]) -> None:
        self._source, self._progress = source, progress

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """See ``parts.Source``."""
        digest = self._source.read(where, view, ahead)
        self._progress(len(view))
        return digest


def _is_like(saved: Saved, like: Any) -> bool:
    """Return whether a tensor gets the layout of a DTensor."""
    return like is not None and tuple(like.shape) == saved.shape


def _intersection(piece: Piece, offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
    """Return the begin and end of the intersection of a piece and a part; None if it is empty."""
    low = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.shape, offsets, shape, strict=True)]
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None
