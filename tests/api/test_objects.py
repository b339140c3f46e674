"""Collectives of Python objects."""

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def thing(rank: int) -> object:
    """Return an object whose type and length differ on each rank."""
    return [None, {"a": [1, 2.5, "x" * 3000]}, torch.arange(5.0), b"\0" * 400_000][rank % 4]


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("ranks", "weights_only"), [(1, False), (2, False), (4, False), (2, True)])
def test_collectives_transfer_python_objects(ranks: int, weights_only: bool) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        only = {"weights_only": weights_only}
        everything = [None] * size
        dist.all_gather_object(everything, thing(me), **only)
        assert all(same(everything[r], thing(r)) for r in range(size))
        for root in range(size):
            gathered = [None] * size if me == root else None
            dist.gather_object(thing(me), gathered, dst=root, **only)
            assert gathered is None or all(same(gathered[r], thing(r)) for r in range(size))
            objects = [thing(root), root] if me == root else [None, None]
            dist.broadcast_object_list(objects, src=root, **only)
            assert same(objects[0], thing(root))
            assert objects[1] == root
            out = [None]
            dist.scatter_object_list(out, [thing(r) for r in range(size)] if me == root else None, src=root, **only)
            assert same(out[0], thing(me))
        if size > 1 and me == 0:
            dist.send_object_list([thing(1), "end"], dst=1, **only)
        if me == 1:
            objects = [None, None]
            assert dist.recv_object_list(objects, **only) == 0
            assert same(objects[0], thing(1))
            assert objects[1] == "end"

    run_ranks(ranks, body)


class Program:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> object:
        return print, ("code of another rank",)


def test_weights_only_runs_no_code_of_the_sender() -> None:
    def body() -> None:
        me = dist.get_rank()
        if me == 0:
            dist.send_object_list([Program()], 1, weights_only=True)
            dist.send_object_list([1], 1)
            dist.send_object_list([1], 1, weights_only=True)
        else:
            with pytest.raises(dist.UsageError, match="weights_only=True does not accept"):
                dist.recv_object_list([None], 0, weights_only=True)
            with pytest.raises(dist.MismatchError, match="rank 0 passed weights_only=False"):
                dist.recv_object_list([None], 0, weights_only=True)
            with pytest.raises(dist.MismatchError, match="rank 0 passed weights_only=True"):
                dist.recv_object_list([None], 0)

    run_ranks(2, body)


def test_object_collectives_in_a_group_use_world_ranks() -> None:
    def body() -> None:
        me = dist.get_rank()
        pair = dist.new_group([0, 2])
        if me != 1:
            objects = [me if me == 2 else None]
            dist.broadcast_object_list(objects, src=2, group=pair)
            assert objects == [2]
            both = [None, None]
            dist.all_gather_object(both, me, group=pair)
            assert both == [0, 2]

    run_ranks(3, body)


def test_wrong_arguments() -> None:
    def body() -> None:
        me = dist.get_rank()
        for call, words in (
            (lambda: dist.all_gather_object([None], 1), "a list of 2 objects"),
            (lambda: dist.gather_object(1, None if me == 0 else [None, None], dst=0), "on no other rank"),
            (lambda: dist.broadcast_object_list([], src=0), "a list of size at least 1"),
            (lambda: dist.scatter_object_list([], [1, 2] if me == 0 else None), "a list of size at least 1"),
            (lambda: dist.send_object_list([1], dst=me), "is this rank itself"),
        ):
            with pytest.raises(dist.UsageError, match=words):
                call()
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            dist.all_gather_object([None, None], lambda: None)
        if me == 0:
            dist.broadcast_object_list([1, 2], src=0)
        else:
            with pytest.raises(dist.UsageError, match="1 objects on this rank, but 2 on the sending rank"):
                dist.broadcast_object_list([None], src=0)
        dist.barrier()

    run_ranks(2, body)
