"""Saving: what each rank has is compared, dealt out and written; then all vote, and rank 0 makes it a checkpoint.

A failure of any rank, before the vote, is a failure of all, and the folder has what it had. In the background the same
happens in a thread, on a copy; its large calls run without the GIL, and its vote on a group of its own.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from allranks import __version__
from allranks._base.errors import AllranksError, CheckpointError, UsageError, rank_list
from allranks._base.forks import guard
from allranks._call.bytes import view_of
from allranks.checkpoint import folders, parts
from allranks.checkpoint.company import Company, company_of, this_process
from allranks.checkpoint.layout import Job, Offer, Plan, make_plan
from allranks.checkpoint.manifest import BLOCK, FORMAT, File, Manifest, Piece, Saved, Writer
from allranks.checkpoint.values import Flat, Shard, Tree, flatten

__all__ = ["Saving", "save", "save_async"]

_T = TypeVar("_T")
_SMALL = 64 << 10  # bytes: larger tensors are compared by a sample
_SAMPLES, _GRAIN = 1024, 64  # so many, of so many bytes


@dataclass
class _Gathered:
    """What is to be written, as all ranks know it.

    Attributes:
        plan: who writes what.
        flat: this rank's state.
        trees: different ones, and which is whose.
        processes: host and pid of each rank.
    """

    plan: Plan
    flat: Flat
    trees: tuple[list[Tree], list[int]]
    processes: list[tuple[str, int]]


def save(
    state: object,
    folder: folders.PathLike,
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    group: Any = None,
) -> Path:
    """Writes a checkpoint of what all ranks have. Called by all of them; see ``allranks.checkpoint.save``."""
    call = _Call(folder, step, keep, keep_every, group)
    gathered = _gather(call, state, own)
    return call.write(gathered, call.company, _views(gathered.plan.files.get(call.company.rank, []), gathered.flat))


class _Call:
    """One call of save or save_async."""

    def __init__(
        self, folder: folders.PathLike, step: int, keep: int | None, keep_every: int | None, group: Any
    ) -> None:
        check_numbers("checkpoint.save", step, keep, keep_every)
        self.folder = Path(os.path.realpath(folder))
        self.step, self.keep, self.keep_every = step, keep, keep_every
        self.company = company_of(group)

    def write(self, gathered: _Gathered, company: Company, views: Sequence[memoryview]) -> Path:
        """Writes this rank's part, votes, and returns the checkpoint, on every rank."""
        with contextlib.ExitStack() as held:
            partial = self._open(held, company)
            jobs = gathered.plan.files.get(company.rank, [])

            def written() -> tuple[File, list[bytes]] | None:
                return parts.write_part(partial, jobs, self.step, company.rank, views) if jobs else None

            try:
                records = self._vote(company, written)
                manifest = self._manifest(gathered, records)
                return self._finish(company, partial, manifest)
            except BaseException:
                if company.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                raise

    def _open(self, held: contextlib.ExitStack, company: Company) -> Path:
        """Rank 0 takes the lock and makes the folder, which all must see."""

        def opened() -> str:
            if company.rank:
                return ""
            held.enter_context(folders.holding(self.folder, run_id()))
            return str(folders.new_partial(self.folder, self.step))

        return Path(self._vote(company, opened)[0])

    def _finish(self, company: Company, partial: Path, manifest: Manifest) -> Path:
        def finished() -> str:
            if company.rank:
                return ""
            folders.sync_folder(partial)
            path = folders.complete(partial, manifest, 1)
            folders.keep_some(path, self.keep, self.keep_every)
            return str(path)

        return Path(self._vote(company, finished)[0])

    def _vote(self, company: Company, act: Callable[[], _T]) -> list[_T]:
        """All ranks do something. Returns what each has come to; raises on all what has failed on one."""
        trouble: BaseException | None = None
        outcome: Any = None
        try:
            outcome = act()
        except Exception as error:  # noqa: BLE001 - told to all ranks
            trouble = error
        told = None if trouble is None else (_described(trouble), isinstance(trouble, UsageError))
        answers = company.exchange((told, outcome, this_process()))
        failed = [rank for rank, (why, _, _) in enumerate(answers) if why is not None]
        if not failed:
            return [value for _, value, _ in answers]
        (why, is_usage), _, (host, pid) = answers[failed[0]]
        if is_usage:
            raise UsageError(why) from trouble
        raise CheckpointError(
            f"checkpoint.save: step {self.step} was not saved into {self.folder}: {rank_list(failed)}"
            f" ({host}, pid {pid}): {why}.\n  What was there before is unchanged."
        ) from trouble

    def _manifest(self, gathered: _Gathered, records: Sequence[tuple[File, list[bytes]] | None]) -> Manifest:
        numbers: dict[int, int] = {}
        files: list[File] = []
        for rank, record in enumerate(records):
            if record is not None:
                numbers[rank] = len(files)
                files.append(record[0])
        pieces: dict[tuple[str, tuple[int, ...]], list[Piece]] = {}
        offers: dict[tuple[str, tuple[int, ...]], Offer] = {}
        for rank, jobs in gathered.plan.files.items():
            record = records[rank]
            assert record is not None
            for job, hashes in zip(jobs, record[1], strict=True):
                offer, key = job.offer, (job.offer.name, job.ranks)
                offers[key] = offer
                begin = files[numbers[rank]].head + job.begin
                pieces.setdefault(key, []).append(Piece(numbers[rank], begin, offer.offsets, offer.part, hashes))
        saved = [
            Saved(name, offers[name, ranks].dtype, offers[name, ranks].shape, tuple(pieces[name, ranks]), ranks)
            for name, ranks in sorted(pieces)
        ]
        trees, whose = gathered.trees
        writers = [Writer(host, pid, tree) for (host, pid), tree in zip(gathered.processes, whose, strict=True)]
        return new_manifest(self.step, writers, files, saved, trees)


def check_numbers(call: str, step: int, keep: int | None, keep_every: int | None) -> None:
    """Refuses what no checkpoint can have as its step, or nobody can keep."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise UsageError(f"{call}: step={step!r}: expected a whole number that is not negative")
    for name, number in (("keep", keep), ("keep_every", keep_every)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UsageError(f"{call}: {name}={number!r}: expected a number of checkpoints, at least 1")


def new_manifest(
    step: int, writers: Sequence[Writer], files: Sequence[File], tensors: Sequence[Saved], trees: Sequence[Tree]
) -> Manifest:
    """The manifest of what this job has just written."""
    return Manifest(
        FORMAT, step, run_id(), time.time(), __version__, BLOCK, tuple(writers), tuple(files), tuple(tensors),
        tuple(trees),
    )  # fmt: skip


def _described(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or errno.errorcode.get(error.errno, error.errno)}{where}"
    return str(error) if isinstance(error, AllranksError) else f"{type(error).__name__}: {error}"


_run = ""


def run_id() -> str:
    """The name of the job; of this process, where the job has none."""
    global _run
    if not _run:
        found = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        _run = found if found != "none" else f"{this_process()[0]}-{os.getpid()}-{int(time.time())}"
    return _run


# What the ranks have.


def _gather(call: _Call, state: object, own: Sequence[str]) -> _Gathered:
    company = call.company
    flat: Flat | None = None

    def mine() -> tuple[Tree, list[Offer], tuple[str, int]]:
        nonlocal flat
        flat = flatten(state)
        return flat.tree, [_offer(name, value, own) for name, value in flat.tensors.items()], this_process()

    found = call._vote(company, mine)
    assert flat is not None
    trees: list[Tree] = []
    whose = []
    for tree, _, _ in found:
        if tree not in trees:
            trees.append(tree)
        whose.append(trees.index(tree))
    return _Gathered(
        make_plan([offers for _, offers, _ in found]), flat, (trees, whose), [process for _, _, process in found]
    )


def _offer(name: str, value: Tensor | Shard, own: Sequence[str]) -> Offer:
    part, offsets, shape = local_part(name, value)
    is_own = any(name == path or name.startswith(f"{path}.") for path in own)
    dtype = str(part.dtype).removeprefix("torch.")
    return Offer(name, dtype, part.element_size(), shape, offsets, tuple(part.shape), _digest(part), is_own)


def local_part(name: str, value: Tensor | Shard) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """What this rank has of a tensor: the part, where it begins, and the shape of the whole."""
    if isinstance(value, Shard):
        return value.tensor.detach(), value.offsets, value.shape
    if hasattr(value, "_local_tensor") and hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    return value.detach().resolve_conj().resolve_neg(), (0,) * value.dim(), tuple(value.shape)


def _part_of_dtensor(name: str, value: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(f"checkpoint: DTensor {name!r} is a partial sum; redistribute it before it is saved")
    part = value._local_tensor.detach()
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape) != tuple(part.shape):
        raise UsageError(
            f"checkpoint: DTensor {name!r}: its local part has shape {list(part.shape)}, not {list(shape)}"
        )
    whole = tuple(value.shape)
    offsets = tuple(min(begin, length) for begin, length in zip(offsets, whole, strict=True))
    return part, offsets, whole


def _digest(part: Tensor) -> int:
    """Of all bytes of a small tensor, of a sample of a large one."""
    if not part.numel():
        return 0
    if part.nbytes <= _SMALL:
        plain = part.cpu().contiguous()
        return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1
    flat = part.reshape(-1)  # a copy, where it is not contiguous
    stride = max(1, flat.numel() // _SAMPLES)
    grain = max(1, _GRAIN // part.element_size())
    rows = flat[: stride * _SAMPLES].view(-1, stride)[:, :grain] if flat.numel() >= stride * _SAMPLES else flat
    plain = torch.cat([rows.reshape(-1), flat[-grain:]]).cpu()
    return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1


def _views(jobs: Sequence[Job], flat: Flat) -> _Views:
    return _Views([local_part(job.offer.name, flat.tensors[job.offer.name])[0] for job in jobs])


class _Views(Sequence[memoryview]):
    """The memory of tensors. One that is on a device, or not contiguous, is copied when it is its turn."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._tensors[index]
        self._plain = tensor.cpu().contiguous()
        return view_of(self._plain) if tensor.nbytes else memoryview(b"")

    def __iter__(self) -> Iterator[memoryview]:
        for index in range(len(self)):
            yield self[index]


# In the background.


class Saving:
    """A save that goes on in the background.

    Attributes:
        folder: where to.
        step: of the training.
        stall_s: how long the call of ``save_async`` took.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.stall_s = folder, step, 0.0
        self._ended = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is complete.

        Args:
            timeout: in seconds; None: for ever.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it was not saved, and why.
            TimeoutError: it has not ended in time. It goes on.
        """
        from allranks._base.errors import TimeoutError

        if not self._ended.wait(timeout):
            raise TimeoutError(f"checkpoint: step {self.step} was not saved into {self.folder} within {timeout:g} s")
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def __repr__(self) -> str:
        how = "goes on" if not self.done() else "failed" if self._error is not None else "is complete"
        return f"<Saving of step {self.step} into {self.folder}: {how}>"


class _Background:
    """What saves in the background share: at most one of them at a time, and its memory."""

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.memory: Tensor | None = None
        self.apart: tuple[object, Company] | None = None  # whose ranks, and they

    def settle(self) -> None:
        """Waits for the save that goes on; raises its error, if nobody has been told."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving._ended.wait()
            if saving._error is not None and not saving._told:
                saving._told = True
                raise saving._error

    def take(self, nbytes: int) -> Tensor:
        """So much memory, which has been touched."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None
            self.memory = _touched(nbytes)
        return self.memory[:nbytes]


_background = _Background()


def settle() -> None:
    """See ``_Background.settle``."""
    _background.settle()


def _touched(nbytes: int) -> Tensor:
    """Memory whose pages are there: the kernel would clear each when it is first written to, in the stall."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        memory.madvise(_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_POPULATE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


def save_async(
    state: object,
    folder: folders.PathLike,
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    group: Any = None,
) -> Saving:
    """Copies what this rank will write, and writes it in the background; see ``allranks.checkpoint.save_async``."""
    began = time.monotonic()
    settle()
    call = _Call(folder, step, keep, keep_every, group)
    company = _company_apart(call.company)
    gathered = _gather(call, state, own)
    jobs = gathered.plan.files.get(call.company.rank, [])
    views = _copied(jobs, gathered.flat)
    gathered.flat.tensors.clear()
    saving = Saving(call.folder, step)

    def run() -> None:
        try:
            saving._path = call.write(gathered, company, views)
        except BaseException as error:  # noqa: BLE001 - it is raised by the next call
            saving._error = error
        finally:
            saving._ended.set()

    thread = threading.Thread(target=run, name=f"allranks-checkpoint-{step}")
    with guard:
        thread.start()
    _background.saving = saving
    saving.stall_s = time.monotonic() - began
    return saving


def _company_apart(company: Company) -> Company:
    """The same ranks, for calls in the background: those of the last save, unless one of them lacks it."""
    if company.size == 1:
        return company
    kept = _background.apart
    mine = kept is not None and kept[0] == company.identity and kept[1].is_open()
    if not all(company.exchange(mine)):
        kept = _background.apart = (company.identity, company.apart())
    assert kept is not None
    return kept[1]


def _copied(jobs: Sequence[Job], flat: Flat) -> list[memoryview]:
    memory = _background.take(sum(_aligned(job.offer.nbytes) for job in jobs))
    views, at = [], 0
    for job in jobs:
        part = local_part(job.offer.name, flat.tensors[job.offer.name])[0]
        place = memory[at : at + part.nbytes]
        if part.nbytes:
            place.view(part.dtype).view(part.shape).copy_(part)
        views.append(view_of(place) if part.nbytes else memoryview(b""))
        at += _aligned(part.nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
