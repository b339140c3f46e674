"""Detection of the ranks that see the same folder: each host may have a folder of this name on its own disk.

The result does not rely on host names, paths or file systems. Rank 0 has created a folder with a random name, and each
rank checks whether it exists. Each rank that does not find it creates a marker file with its number. Then all ranks
check for these marker files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from allranks._base.errors import CheckpointError, rank_list
from allranks.checkpoint import folders
from allranks.checkpoint.participants import Participants

__all__ = ["leaders_of", "share_numbers_of"]


class FolderVote(Protocol):
    """Run an action on all ranks. The failure of one rank is raised on all ranks; see ``saving``."""

    def __call__(self, participants: Participants, action: Callable[[], None]) -> list[None]: ...


def leaders_of(
    participants: Participants, folder: Path, partial: str, vote: FolderVote, held: contextlib.ExitStack
) -> list[int]:
    """Return for each rank the first rank that sees the same folder. All ranks call it.

    Args:
        participants: The ranks.
        folder: Folder of this rank.
        partial: Name of the folder that rank 0 has created in its folder.
        vote: See ``FolderVote``.
        held: Removes the marker file of this rank when it is closed.

    Raises:
        CheckpointError: A folder cannot be written to. Or the result is inconsistent: for example, rank 1 sees the
            folders of ranks 0 and 2, and these do not see each other's.
    """
    sees_first = participants.exchange((folder / partial).is_dir(), bool)
    missing = [rank for rank, sees in enumerate(sees_first) if not sees]
    if not missing:
        return [0] * participants.size

    def mark() -> None:
        if participants.rank in missing:
            held.callback(folders.create_marker(folder, partial, participants.rank).unlink, missing_ok=True)

    # All markers must exist before any rank looks for them.
    vote(participants, mark)
    seen = [rank for rank in missing if folders.has_marker(folder, partial, rank)]
    own_view = (0 if sees_first[participants.rank] else min(seen, default=participants.rank), seen)
    views = participants.exchange(own_view, tuple[int, list[int]])
    leaders = [leader for leader, _ in views]

    def check() -> None:
        expected = [rank for rank in missing if leaders[rank] == leaders[participants.rank]]
        if seen != expected or (leaders[participants.rank] == 0) != sees_first[participants.rank]:
            raise CheckpointError(
                f"cannot determine which ranks share the folder {folder}: rank {participants.rank} sees the marker"
                f" files of {_listed(seen)}; expected those of {_listed(expected)}.\n"
                "  Save into a folder that all ranks share, or into a local folder on each host."
            )

    vote(participants, check)
    return leaders


def _listed(ranks: Sequence[int]) -> str:
    return rank_list(list(ranks)) if ranks else "no rank"


def share_numbers_of(leaders: Sequence[int]) -> list[int]:
    """Return the share number of each rank, from 1. All are 0 if there is one folder."""
    distinct = sorted(set(leaders))
    return [0] * len(leaders) if len(distinct) == 1 else [1 + distinct.index(leader) for leader in leaders]
