"""The words that errors share."""

import pickle

import pytest

from allranks._errors import PeerLostError, rank_list


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 0, 1, 7, 2], "ranks 0-3, 7"),
        ([0, 1, 9], "ranks 0-1, 9"),
        (list(range(100)), "ranks 0-99"),
    ],
)
def test_rank_list(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


def test_a_lost_peer_travels() -> None:
    error = pickle.loads(pickle.dumps(PeerLostError("rank 2 died", 2)))
    assert (str(error), error.rank) == ("rank 2 died", 2)
