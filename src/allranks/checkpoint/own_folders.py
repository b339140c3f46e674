"""Which ranks see the same folder: hosts may have one of the same name each, on disks of their own.

Nothing is guessed of host names, paths or file systems. Rank 0 has made a folder with a random name, and each rank
looks for it. The ranks that do not find it leave a file with their number each, and look for those of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from allranks._base.errors import CheckpointError, rank_list
from allranks.checkpoint import folders
from allranks.checkpoint.company import Company

__all__ = ["leaders_of", "numbers_of"]


class FolderVote(Protocol):
    """All ranks do something, and a failure of one is one of all; see ``saving``."""

    def __call__(self, company: Company, act: Callable[[], None]) -> list[None]: ...


def leaders_of(company: Company, folder: Path, partial: str, vote: FolderVote, held: contextlib.ExitStack) -> list[int]:
    """The first of the ranks that see the same folder, for each rank. All of them call it.

    Args:
        company: the ranks.
        folder: of this rank.
        partial: the name of the folder that rank 0 has made in its own.
        vote: see there.
        held: removes at its end what is left here.

    Raises:
        CheckpointError: a folder cannot be written to; or rank 1 sees the folders of ranks 0 and 2, and they do not see
            each other's.
    """
    sees_first = company.exchange((folder / partial).is_dir(), bool)
    missing = [rank for rank, sees in enumerate(sees_first) if not sees]
    if not missing:
        return [0] * company.size

    def mark() -> None:
        if company.rank in missing:
            held.callback(folders.mark(folder, partial, company.rank).unlink, missing_ok=True)

    vote(company, mark)
    seen = [rank for rank in missing if folders.marked(folder, partial, rank)]
    mine = (0 if sees_first[company.rank] else min(seen, default=company.rank), seen)
    found = company.exchange(mine, tuple[int, list[int]])
    leaders = [leader for leader, _ in found]

    def check() -> None:
        expected = [rank for rank in missing if leaders[rank] == leaders[company.rank]]
        if seen != expected or (leaders[company.rank] == 0) != sees_first[company.rank]:
            raise CheckpointError(
                f"it is not clear which ranks share the folder {folder}: this one sees files of {_listed(seen)}, and"
                f" those of {_listed(expected)} should be there"
            )

    vote(company, check)
    return leaders


def _listed(ranks: Sequence[int]) -> str:
    return rank_list(list(ranks)) if ranks else "no rank"


def numbers_of(leaders: Sequence[int]) -> list[int]:
    """The number of the share of each rank, from 1; all 0 where there is one folder."""
    distinct = sorted(set(leaders))
    return [0] * len(leaders) if len(distinct) == 1 else [1 + distinct.index(leader) for leader in leaders]
