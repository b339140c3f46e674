"""Saving: the ranks compare, distribute and write their state; then they vote, and rank 0 completes the checkpoint.

If a rank fails before the vote, the save fails on all ranks, and the folder is unchanged. If hosts have separate
folders, the first rank of each folder completes its share, and all ranks vote again before old checkpoints are removed.
No rank reports the checkpoint as saved before that vote.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from allranks import __version__
from allranks._base.errors import AllranksError, CheckpointError, UsageError, rank_list
from allranks._call import callsite
from allranks.checkpoint import folders, own_folders, parts
from allranks.checkpoint.folder_claims import agree_on_run_id, agreed_run_id, run_id
from allranks.checkpoint.layout import PartDescription, SavePlan, make_plan
from allranks.checkpoint.manifest import (
    BLOCK,
    SHARED_FORMAT,
    WHOLE_FORMAT,
    FileShare,
    Manifest,
    ManifestFile,
    Piece,
    Saved,
    Writer,
)
from allranks.checkpoint.part_descriptions import ComparisonRules, describe_part, views_of
from allranks.checkpoint.participants import Participants, error_text, participants_of, this_process
from allranks.checkpoint.values import Flat, Tree, flatten

__all__ = [
    "SaveCall",
    "Gathered",
    "check_numbers",
    "failure_text",
    "gather",
    "new_manifest",
    "save_failed_error",
    "save",
]

_T = TypeVar("_T")
_warned: set[Path] = set()


@dataclass
class Gathered:
    """The data to write, which all ranks have agreed on.

    Attributes:
        plan: The writes of each rank.
        flat: State of this rank.
        trees: The distinct trees, and the index of each rank's tree.
        processes: Host and pid of each rank.
        is_copied: Each rank makes a copy before it writes. The copy may fail, so the ranks vote on it.
    """

    plan: SavePlan
    flat: Flat
    trees: tuple[list[Tree], list[int]]
    processes: list[tuple[str, int]]
    is_copied: bool = False


def save(
    state: object,
    folder: folders.PathLike,
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    alike: Sequence[str] = (),
    group: Any = None,
) -> Path:
    """Write a checkpoint of the state of all ranks. All ranks call it; see ``allranks.checkpoint.save``."""
    call = SaveCall(folder, step, keep, keep_every, group)
    gathered = gather(call, state, own, alike)
    return call.write(
        gathered, call.participants, views_of(gathered.plan.files.get(call.participants.rank, []), gathered.flat)
    )


@dataclass
class _OpenSave:
    """A save that has begun.

    Attributes:
        partial: Name of the partial folder, in the folder of each rank.
        run: Name of the job, from rank 0.
        when: Start of the save on rank 0, in seconds since 1970.
        leaders: For each rank, the first rank that sees the same folder.
        numbers: Share number of each rank; 0 if all ranks see one folder.
    """

    partial: str
    run: str
    when: float
    leaders: list[int]
    numbers: list[int]

    @property
    def count(self) -> int:
        """Number of folders."""
        return len(set(self.leaders))


class _VoteResult(msgspec.Struct, frozen=True):
    """Result of an action on one rank.

    Attributes:
        outcome: Encoded return value.
        failure: Why it failed; "" if it succeeded.
        is_usage: The failure is a UsageError.
        process: Host and pid.
    """

    outcome: bytes
    failure: str
    is_usage: bool
    process: tuple[str, int]


class SaveCall:
    """One call of save or save_async."""

    def __init__(
        self, folder: folders.PathLike, step: int, keep: int | None, keep_every: int | None, group: Any
    ) -> None:
        check_numbers("checkpoint.save", step, keep, keep_every)
        # Resolve now: the working directory may change while a save runs in the background.
        self.folder = Path(os.path.realpath(folder))
        self.step, self.keep, self.keep_every = step, keep, keep_every
        self.participants = participants_of(group)
        self._trouble: BaseException | None = None
        self._held: folders.HeldFolder | None = None  # on the first rank that sees a folder

    def write(
        self,
        gathered: Gathered,
        participants: Participants,
        views: Sequence[memoryview],
        failure: BaseException | None = None,
    ) -> Path:
        """Write this rank's part, vote, and return the checkpoint, on every rank.

        Args:
            gathered: The data to write.
            participants: The ranks.
            views: Bytes that this rank writes.
            failure: Failure of this rank before this call. It fails the save on all ranks.
        """

        def begin() -> None:
            if failure is not None:
                raise failure if isinstance(failure, Exception) else CheckpointError(f"{type(failure).__name__}")

        with contextlib.ExitStack() as held:
            # Before the folder is opened: a failed copy then leaves nothing on the disk.
            if gathered.is_copied:
                self._vote(participants, begin)
            opened = self._open(held, participants)
            jobs = gathered.plan.files.get(participants.rank, [])

            def written() -> tuple[ManifestFile, list[bytes]] | None:
                partial = self.folder / opened.partial
                return parts.write_part(partial, jobs, self.step, participants.rank, views) if jobs else None

            # After this vote, the bytes of all ranks are on their disks.
            records = self._vote(participants, written, tuple[ManifestFile, list[bytes]] | None)
            return self._finish(participants, opened, self._manifest(gathered, records, opened))

    def _open(self, held: contextlib.ExitStack, participants: Participants) -> _OpenSave:
        """Take the lock and create the partial folder, on rank 0 and on the first rank of each other folder."""

        def open_own() -> None:
            # Rank 0 has already opened its folder.
            if 0 < participants.rank == leaders[participants.rank]:
                open_here(name)

        def open_here(name: str = "") -> tuple[str, str, float]:
            self._held = held.enter_context(folders.hold_folder(self.folder, run_id()))
            partial = folders.new_partial(self.folder, self.step, name)
            held.callback(shutil.rmtree, partial, ignore_errors=True)  # a complete checkpoint has another name
            return partial.name, run_id(), time.time()

        def open_first() -> tuple[str, str, float]:
            return ("", "", 0.0) if participants.rank else open_here()

        name, run, when = self._vote(participants, open_first, tuple[str, str, float])[0]
        leaders = own_folders.leaders_of(participants, self.folder, name, self._vote, held)
        opened = _OpenSave(name, run, when, leaders, own_folders.share_numbers_of(leaders))
        if opened.count > 1:
            self._vote(participants, open_own)
            if participants.rank == 0:
                self._warn(opened)
        return opened

    def _warn(self, opened: _OpenSave) -> None:
        """Warn once per folder: a disk that one host has not mounted has the same symptom."""
        if self.folder in _warned:
            return
        _warned.add(self.folder)
        sets = [[r for r, n in enumerate(opened.numbers) if n == number] for number in range(1, opened.count + 1)]
        callsite.warn(
            f"checkpoint.save: the ranks have {opened.count} different folders {self.folder}:"
            f" {'; '.join(rank_list(ranks) for ranks in sets[:8])}{'; ...' if sets[8:] else ''}. Each folder gets a"
            " share of the checkpoint, and all shares are needed to load it.\n"
            "  If the hosts should share one folder, mount its file system on all of them."
        )

    def _finish(self, participants: Participants, opened: _OpenSave, manifest: Manifest) -> Path:
        """Complete the checkpoint.

        If the exchange of the final vote fails, nothing is undone, because another rank may have received all votes.
        """
        partial, leads = self.folder / opened.partial, opened.leaders[participants.rank] == participants.rank

        def commit() -> tuple[str, list[str]]:
            if not leads:
                return "", []
            # The names of the parts must be on the disk before the manifest that lists them.
            folders.sync_folder(partial)
            path = folders.complete(partial, manifest)
            # With several folders, another share may still fail, so old checkpoints stay until all shares exist.
            return path.name, self._tidy(path) if opened.count == 1 else []

        if opened.count == 1:
            outcomes = self._vote(participants, commit, tuple[str, list[str]])
            checkpoint, remarks = self.folder / outcomes[0][0], outcomes[0][1]
        else:
            results = self._poll(participants, commit)
            checkpoint = self.folder / folders.new_name(self.folder, manifest)
            # All ranks have received the failure, so no rank has reported the checkpoint as saved.
            if any(result.failure for result in results):
                if leads:
                    with contextlib.suppress(OSError):  # a share without the other shares is not loaded
                        folders.remove(checkpoint)
                self._raise(results)
            remarks = self._vote(participants, lambda: self._tidy(checkpoint) if leads else [], list[str])[
                participants.rank
            ]
        if leads:
            folders.warn_of_remarks(f"checkpoint.save: step {self.step} is complete in {checkpoint}", remarks)
        return checkpoint

    def _tidy(self, checkpoint: Path) -> list[str]:
        """Remove old checkpoints. Return those that could not be removed, which does not make the save fail."""
        assert self._held is not None
        return self._held.remarks + folders.tidy(checkpoint, self.keep, self.keep_every, self._held.run)

    def _vote(self, participants: Participants, action: Callable[[], _T], kind: Any = None) -> list[_T]:
        """Run an action on all ranks, and return each result, of type `kind`. A failure on one is raised on all."""
        results = self._poll(participants, action)
        if any(result.failure for result in results):
            self._raise(results)
        decode = msgspec.msgpack.Decoder(kind).decode
        return [decode(result.outcome) for result in results]

    def _poll(self, participants: Participants, action: Callable[[], Any]) -> list[_VoteResult]:
        """Run an action on all ranks. Return the success or failure of each."""
        try:
            result = _VoteResult(msgspec.msgpack.encode(action()), "", False, this_process())
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            # Kept on this rank for the traceback: the other ranks receive only the text.
            self._trouble = error
            result = _VoteResult(b"", failure_text(error), isinstance(error, UsageError), this_process())
        return participants.exchange(result, _VoteResult)

    def _raise(self, results: Sequence[_VoteResult]) -> NoReturn:
        trouble, self._trouble = self._trouble, None
        failed = [rank for rank, result in enumerate(results) if result.failure]
        first = results[failed[0]]
        if first.is_usage:
            raise UsageError(_usage_text(failed, len(results), first)) from trouble
        raise save_failed_error(
            "checkpoint.save", self.step, self.folder, failed, first.process, first.failure
        ) from trouble

    def _manifest(
        self, gathered: Gathered, records: Sequence[tuple[ManifestFile, list[bytes]] | None], opened: _OpenSave
    ) -> Manifest:
        """Return the manifest, which is the same on all ranks, except for the number of the share."""
        numbers: dict[int, int] = {}
        files: list[ManifestFile] = []
        for rank, record in enumerate(records):
            if record is not None:
                numbers[rank] = len(files)
                files.append(msgspec.structs.replace(record[0], share=opened.numbers[rank]))
        pieces: dict[tuple[str, tuple[int, ...]], list[Piece]] = {}
        descriptions: dict[tuple[str, tuple[int, ...]], PartDescription] = {}
        for rank, jobs in gathered.plan.files.items():
            record = records[rank]
            assert record is not None
            for job, hashes in zip(jobs, record[1], strict=True):
                description, key = job.description, (job.description.name, job.ranks)
                descriptions[key] = description
                begin = files[numbers[rank]].head + job.begin
                pieces.setdefault(key, []).append(
                    Piece(numbers[rank], begin, description.offsets, description.part, hashes)
                )
        saved = [
            Saved(
                name,
                descriptions[name, ranks].dtype,
                descriptions[name, ranks].shape,
                tuple(pieces[name, ranks]),
                ranks,
            )
            for name, ranks in sorted(pieces)
        ]
        trees, tree_indices = gathered.trees
        writers = [Writer(host, pid, tree) for (host, pid), tree in zip(gathered.processes, tree_indices, strict=True)]
        manifest = new_manifest(self.step, writers, files, saved, trees)
        if opened.count == 1:
            return manifest
        # The manifests of all shares must be equal, so the time and the name of the job are those of rank 0.
        share = FileShare(folders.id_of(opened.partial), opened.numbers[self.participants.rank], opened.count)
        return msgspec.structs.replace(manifest, format=SHARED_FORMAT, run=opened.run, when=opened.when, share=share)


def check_numbers(call: str, step: int, keep: int | None, keep_every: int | None) -> None:
    """Reject an invalid step, and an invalid number of checkpoints to keep."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise UsageError(f"{call}: step={step!r}: expected an integer from 0 to 10**18 - 1")
    for name, number in (("keep", keep), ("keep_every", keep_every)):
        # True is an int: keep=True would keep a single checkpoint and remove all others.
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise UsageError(f"{call}: {name}={number!r}: expected an integer that is at least 1")


def new_manifest(
    step: int, writers: Sequence[Writer], files: Sequence[ManifestFile], tensors: Sequence[Saved], trees: Sequence[Tree]
) -> Manifest:
    """Return the manifest of the data that this job has just written."""
    return Manifest(
        WHOLE_FORMAT, step, run_id(), time.time(), __version__, BLOCK, tuple(writers), tuple(files), tuple(tensors),
        tuple(trees),
    )  # fmt: skip


def save_failed_error(
    call: str, step: int, folder: Path, ranks: Sequence[int], process: tuple[str, int], failure: str
) -> CheckpointError:
    """Return the error of a save that has failed on some ranks. The process is that of the first failed rank."""
    return CheckpointError(
        f"{call}: step {step} was not saved into {folder}: {rank_list(list(ranks))} ({process[0]}, pid {process[1]}):"
        f" {failure.removesuffix('.')}.\n  Earlier checkpoints are unchanged."
    )


def _usage_text(failed: Sequence[int], size: int, first: _VoteResult) -> str:
    """Return the text of a UsageError. If it concerns only some ranks, it names them and the first one's process."""
    if len(failed) == size:
        return first.failure
    found = first.failure.removeprefix("checkpoint: ").removeprefix("checkpoint.save: ")
    return f"checkpoint.save: {rank_list(list(failed))} ({first.process[0]}, pid {first.process[1]}): {found}"


_ACTIONS = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT), "Free disk space, or keep fewer checkpoints with keep=."
) | dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Save into a folder that this user can write to.")


def failure_text(error: BaseException) -> str:
    """Return the text of an error, for a message."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename else ""
        why = f"{error.strerror or errno.errorcode.get(error.errno, error.errno)}{where}"
        action = _ACTIONS.get(error.errno)
        return error_text(OSError(f"{why}.\n  {action}" if action else why))
    return error_text(error) if isinstance(error, AllranksError) else f"{type(error).__name__}: {error_text(error)}"


# Exchange of the states.


def gather(call: SaveCall, state: object, own: Sequence[str], alike: Sequence[str]) -> Gathered:
    """Exchange the state of all ranks, and plan the writes of each rank. All ranks call it."""
    participants = call.participants
    flat: Flat | None = None

    rules = ComparisonRules(own, alike, participants.size)

    def describe_state() -> tuple[Tree, list[PartDescription], tuple[str, int], tuple[str, str]]:
        nonlocal flat
        flat = flatten(state)
        descriptions = [describe_part(name, value, rules) for name, value in flat.tensors.items()]
        return flat.tree, descriptions, this_process(), (agreed_run_id(), run_id())

    states = call._vote(
        participants, describe_state, tuple[Any, list[PartDescription], tuple[str, int], tuple[str, str]]
    )
    assert flat is not None
    # Before the manifest and the lock, which contain the name.
    agree_on_run_id([names for *_, names in states])
    trees: list[Tree] = []
    tree_indices = []
    for tree, *_ in states:
        if tree not in trees:
            trees.append(tree)
        tree_indices.append(trees.index(tree))
    return Gathered(
        make_plan([descriptions for _, descriptions, *_ in states]),
        flat,
        (trees, tree_indices),
        [process for _, _, process, _ in states],
    )
