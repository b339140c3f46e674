"""Formatting of rank lists and system errors in error messages, and pickling of errors that name a rank."""

import errno
import pickle

import pytest

from allranks._base.errors import PeerLostError, RankError, rank_list
from allranks._base.system import reason, refusal


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 0, 1, 7, 2], "ranks 0-3, 7"),
        ([0, 1, 9], "ranks 0-1, 9"),
        (list(range(100)), "ranks 0-99"),
    ],
)
def test_rank_list_merges_consecutive_ranks(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


@pytest.mark.parametrize("kind", [PeerLostError, RankError])
def test_errors_that_name_a_rank_survive_pickling(kind: type[PeerLostError | RankError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 2 died", 2)))
    assert (type(error), str(error), error.rank) == (kind, "rank 2 died", 2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "/Data"), "no such file or directory (/Data)"),
        (OSError("Cannot map /Data/Run of Host-A"), "cannot map /Data/Run of Host-A"),
        (OSError(0, "EOF occurred"), "EOF occurred"),
    ],
)
def test_system_errors_keep_names_and_abbreviations(error: OSError, text: str) -> None:
    assert refusal("the trace", error) == f"the trace: {text}"
    assert reason(error) in text
