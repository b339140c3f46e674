"""Wrong calls raise the same exception types under allranks as under torch.distributed.

The types are TypeError, ValueError and RuntimeError. Every rank makes the wrong call at the same time, under gloo and
under allranks. The table DIFFERENT gives the reason for each deviation. allranks raises for every wrong call. If gloo
returns instead, the test only requires that allranks raises.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import allranks
from support.workers import Workers

KINDS = (TypeError, ValueError, RuntimeError)  # UsageError of allranks is a ValueError and a RuntimeError


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


def meta() -> torch.Tensor:
    return torch.ones(2, device="meta")


def two(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone(), tensor.clone()]


def closed(dist: Any) -> Any:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group


# Calls with torch's names on two ranks. ``d`` is the library.
CALLS: dict[str, Callable[[Any], Any]] = {
    # not a tensor
    "all_reduce a list": lambda d: d.all_reduce([1.0, 2.0]),
    "all_reduce a number": lambda d: d.all_reduce(1.0),
    "reduce None": lambda d: d.reduce(None, 0),
    "broadcast a string": lambda d: d.broadcast("x", 0),
    "all_gather a number": lambda d: d.all_gather(two(ones(1)), 1.0),
    "all_gather into numbers": lambda d: d.all_gather([1.0, 2.0], ones(1)),
    "all_gather into a tensor": lambda d: d.all_gather(ones(2), ones(1)),
    "all_gather_into_tensor a list": lambda d: d.all_gather_into_tensor(ones(2), [1.0]),
    "all_gather_into_tensor into a list": lambda d: d.all_gather_into_tensor(two(ones(1)), ones(1)),
    "gather a number": lambda d: d.gather(1.0, two(ones(1)) if d.get_rank() == 0 else None, 0),
    "gather into numbers": lambda d: d.gather(ones(1), [1, 2], d.get_rank()),
    "scatter into a number": lambda d: d.scatter(1.0, two(ones(1)) if d.get_rank() == 0 else None, 0),
    "scatter numbers": lambda d: d.scatter(ones(1), [1, 2], d.get_rank()),
    "reduce_scatter numbers": lambda d: d.reduce_scatter(ones(1), [1, 2]),
    "reduce_scatter a tensor": lambda d: d.reduce_scatter(ones(1), ones(2)),
    "reduce_scatter_tensor a list": lambda d: d.reduce_scatter_tensor(ones(1), two(ones(1))),
    "all_to_all numbers": lambda d: d.all_to_all(two(ones(1)), [1, 2]),
    "all_to_all tensors": lambda d: d.all_to_all(ones(2), ones(2)),
    "all_to_all_single a list": lambda d: d.all_to_all_single(ones(2), [1.0, 2.0]),
    "send a number": lambda d: d.send(1.0, 1 - d.get_rank()),
    "recv into a list": lambda d: d.recv([0.0], 1 - d.get_rank()),
    "isend a number": lambda d: d.isend(1.0, 1 - d.get_rank()),
    "irecv into None": lambda d: d.irecv(None, 1 - d.get_rank()),
    # lists whose length is not the group size
    "all_gather into 1": lambda d: d.all_gather([ones(1)], ones(1)),
    "all_gather into 0": lambda d: d.all_gather([], ones(1)),
    "all_gather into 3": lambda d: d.all_gather([ones(1)] * 3, ones(1)),
    "gather into 3": lambda d: d.gather(ones(1), [ones(1) for _ in range(3)], d.get_rank()),
    "gather into nothing on dst": lambda d: d.gather(ones(1), None, d.get_rank()),
    "gather with a list elsewhere": lambda d: d.gather(ones(1), two(ones(1)), 1 - d.get_rank()),
    "scatter of 3": lambda d: d.scatter(ones(1), [ones(1)] * 3, d.get_rank()),
    "scatter of nothing on src": lambda d: d.scatter(ones(1), None, d.get_rank()),
    "scatter with a list elsewhere": lambda d: d.scatter(ones(1), two(ones(1)), 1 - d.get_rank()),
    "reduce_scatter of 1": lambda d: d.reduce_scatter(ones(1), [ones(1)]),
    "reduce_scatter of 3": lambda d: d.reduce_scatter(ones(1), [ones(1)] * 3),
    "all_to_all of 1": lambda d: d.all_to_all(two(ones(1)), [ones(1)]),
    "all_to_all into 3": lambda d: d.all_to_all([ones(1)] * 3, two(ones(1))),
    # sizes
    "all_gather other sizes": lambda d: d.all_gather(two(ones(3)), ones(2)),
    "all_gather_into_tensor too small": lambda d: d.all_gather_into_tensor(ones(3), ones(2)),
    "gather other sizes": lambda d: d.gather(ones(2), two(ones(3)), d.get_rank()),
    "scatter other sizes": lambda d: d.scatter(ones(2), two(ones(3)), d.get_rank()),
    "reduce_scatter other sizes": lambda d: d.reduce_scatter(ones(2), two(ones(3))),
    "reduce_scatter_tensor too small": lambda d: d.reduce_scatter_tensor(ones(2), ones(3)),
    "all_to_all_single uneven": lambda d: d.all_to_all_single(ones(3), ones(3)),
    "all_to_all_single sizes that do not sum": lambda d: d.all_to_all_single(ones(4), ones(4), [1, 1], [1, 1]),
    "all_to_all_single three sizes": lambda d: d.all_to_all_single(ones(3), ones(3), [1, 1, 1], [1, 1, 1]),
    "all_to_all_single a negative size": lambda d: d.all_to_all_single(ones(4), ones(4), [5, -1], [5, -1]),
    # dtypes
    "all_gather other dtypes": lambda d: d.all_gather(two(ones(1, dtype=torch.float64)), ones(1)),
    "all_gather_into_tensor other dtypes": lambda d: d.all_gather_into_tensor(ones(2, dtype=torch.int64), ones(1)),
    "gather other dtypes": lambda d: d.gather(ones(1), two(ones(1, dtype=torch.int32)), d.get_rank()),
    "scatter other dtypes": lambda d: d.scatter(ones(1), two(ones(1, dtype=torch.int32)), d.get_rank()),
    "reduce_scatter other dtypes": lambda d: d.reduce_scatter(ones(1), two(ones(1, dtype=torch.int32))),
    "reduce_scatter_tensor other dtypes": lambda d: d.reduce_scatter_tensor(ones(1), ones(2, dtype=torch.int32)),
    "all_to_all other dtypes": lambda d: d.all_to_all(two(ones(1)), two(ones(1, dtype=torch.int32))),
    "all_to_all_single other dtypes": lambda d: d.all_to_all_single(ones(2), ones(2, dtype=torch.int32)),
    "BAND of floats": lambda d: d.all_reduce(ones(2), d.ReduceOp.BAND),
    "MAX of complex numbers": lambda d: d.all_reduce(ones(2, dtype=torch.complex64), d.ReduceOp.MAX),
    "a quantized tensor": lambda d: d.all_reduce(torch.quantize_per_tensor(ones(2), 1.0, 0, torch.qint8)),
    # devices and layouts
    "all_reduce on meta": lambda d: d.all_reduce(meta()),
    "reduce on meta": lambda d: d.reduce(meta(), 0),
    "broadcast on meta": lambda d: d.broadcast(meta(), 0),
    "all_gather on meta": lambda d: d.all_gather(two(meta()), meta()),
    "all_gather from meta": lambda d: d.all_gather(two(ones(2)), meta()),
    "scatter on meta": lambda d: d.scatter(meta(), two(meta()), d.get_rank()),
    "send on meta": lambda d: d.send(meta(), 1 - d.get_rank()),
    "broadcast of a sparse tensor": lambda d: d.broadcast(ones(2).to_sparse(), 0),
    "MAX of a sparse tensor": lambda d: d.all_reduce(ones(2).to_sparse(), d.ReduceOp.MAX),
    "all_reduce of a CSR tensor": lambda d: d.all_reduce(ones(2, 2).to_sparse_csr()),
    # ranks
    "broadcast from rank 2": lambda d: d.broadcast(ones(1), 2),
    "broadcast from rank -1": lambda d: d.broadcast(ones(1), -1),
    "broadcast without a root": lambda d: d.broadcast(ones(1)),
    "broadcast from two": lambda d: d.broadcast(ones(1), 0, group_src=0),
    "reduce to rank 2": lambda d: d.reduce(ones(1), 2),
    "reduce without a root": lambda d: d.reduce(ones(1)),
    "gather to rank 2": lambda d: d.gather(ones(1), None, 2),
    "scatter from rank 2": lambda d: d.scatter(ones(1), None, 2),
    "send to rank 2": lambda d: d.send(ones(1), 2),
    "send to itself": lambda d: d.send(ones(1), d.get_rank()),
    "send without a destination": lambda d: d.send(ones(1)),
    "isend to itself": lambda d: d.isend(ones(1), d.get_rank()),
    "recv from rank 2": lambda d: d.recv(ones(1), 2),
    "recv from itself": lambda d: d.recv(ones(1), d.get_rank()),
    "irecv from itself": lambda d: d.irecv(ones(1), d.get_rank()),
    "P2POp with a wrong op": lambda d: d.P2POp(d.broadcast, ones(1), 1 - d.get_rank()),
    "batch_isend_irecv of nothing": lambda d: d.batch_isend_irecv([]),
    "batch_isend_irecv of a tensor": lambda d: d.batch_isend_irecv(ones(1)),
    # ops
    "op is a string": lambda d: d.all_reduce(ones(1), "sum"),
    "op is a large number": lambda d: d.all_reduce(ones(1), 99),
    # groups
    "group is a string": lambda d: d.all_reduce(ones(1), group="world"),
    "group is a number": lambda d: d.barrier(group=5),
    "get_rank of a string": lambda d: d.get_rank("world"),
    "all_reduce in a closed group": lambda d: d.all_reduce(ones(1), group=closed(d)),
    "get_rank in a closed group": lambda d: d.get_rank(closed(d)),
    "destroy a closed group": lambda d: d.destroy_process_group(closed(d)),
    "get_group_rank of a stranger": lambda d: d.get_group_rank(d.group.WORLD, 7),
    "get_global_rank of a stranger": lambda d: d.get_global_rank(d.group.WORLD, 7),
    "new_group with rank 2": lambda d: d.new_group([0, 2]),
    "new_group with a rank twice": lambda d: d.new_group([0, 0]),
    "new_group of no rank": lambda d: d.new_group([]),
    "new_group on an unknown backend": lambda d: d.new_group([0, 1], backend="pigeon"),
    "new_subgroups of three": lambda d: d.new_subgroups(3),
    "new_subgroups of none": lambda d: d.new_subgroups(0),
    "new_subgroups_by_enumeration of nothing": lambda d: d.new_subgroups_by_enumeration([]),
    "new_subgroups_by_enumeration twice": lambda d: d.new_subgroups_by_enumeration([[0, 1], [1]]),
    "init_process_group twice": lambda d: d.init_process_group(),
    # objects
    "all_gather_object into 1": lambda d: d.all_gather_object([None], "x"),
    "gather_object into nothing on dst": lambda d: d.gather_object("x", None, d.get_rank()),
    "gather_object with a list elsewhere": lambda d: d.gather_object("x", [None, None], 1 - d.get_rank()),
    "broadcast_object_list of nothing": lambda d: d.broadcast_object_list([], 0),
    "broadcast_object_list of None": lambda d: d.broadcast_object_list(None, 0),
    "broadcast_object_list from rank 2": lambda d: d.broadcast_object_list(["x"], 2),
    "scatter_object_list of 3": lambda d: d.scatter_object_list([None], ["x"] * 3, d.get_rank()),
    "scatter_object_list of nothing on src": lambda d: d.scatter_object_list([None], None, d.get_rank()),
    "scatter_object_list into nothing": lambda d: d.scatter_object_list([], ["x", "y"], d.get_rank()),
    "send_object_list to itself": lambda d: d.send_object_list(["x"], d.get_rank()),
    "recv_object_list from itself": lambda d: d.recv_object_list([None], d.get_rank()),
    # other calls
    "get_backend of a string": lambda d: d.get_backend("world"),
    "Backend of a number": lambda d: d.Backend(3),
    "set_debug_level to a string": lambda d: d.set_debug_level("INFO"),
    "monitored_barrier of a string": lambda d: d.monitored_barrier("world"),
}


# Gloo crashes or waits until its timeout on these calls, so only allranks makes them.
UNFIT_FOR_GLOO = {
    "all_to_all_single a negative size",
    "broadcast_object_list of nothing",
    "recv from rank 2",
    "scatter_object_list of 3",
    "send to rank 2",
}

# Calls for which allranks deviates from torch, with the reason.
DIFFERENT = {
    "batch_isend_irecv of nothing": "an empty list is returned for zero messages",
    "get_rank in a closed group": "a closed group keeps its ranks; only communication raises",
    "destroy a closed group": "destroying a group twice has no effect",
    "new_group of no rank": "torch raises a TypeError of its C++ binding; a wrong value is a ValueError",
    "new_group on an unknown backend": "torch raises an AssertionError; a wrong setting is a ValueError",
    "all_gather_object into 1": "torch raises an IndexError; a wrong length is a ValueError",
    "broadcast_object_list of None": "torch raises a TypeError here, but a ValueError in scatter_object_list",
}


def raised(call: Callable[[Any], Any], dist: Any) -> Exception | None:
    try:
        call(dist)
    except Exception as error:  # noqa: BLE001 - the test compares the types of all exceptions
        return error
    return None


def kinds(error: Exception | None) -> set[str]:
    """Return the members of KINDS that the error is an instance of, or else its type; an empty set for None."""
    if error is None:
        return set()
    return {k.__name__ for k in KINDS if isinstance(error, k)} or {type(error).__name__}


def answer(groups: Any, name: str) -> tuple[set[str], set[str], str]:
    """Return what torch.distributed raises, what allranks raises, and the text that the launcher prints for it."""
    import torch.distributed as peer

    from allranks.launch.ranks.rank import _report

    theirs = None if name in UNFIT_FOR_GLOO else raised(CALLS[name], peer)
    ours = raised(CALLS[name], allranks)
    shown = "" if ours is None else _report(ours, ours.__traceback__, with_text=True).text
    return kinds(theirs), kinds(ours), shown


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers(2, answer)
    yield made
    made.close()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_raises_the_exception_types_of_torch(workers: Workers, name: str) -> None:
    for theirs, ours, shown in workers.ask(name):
        assert f"{os.sep}src{os.sep}allranks{os.sep}" not in shown, "the last frame must be the user's"
        if name in DIFFERENT:
            assert not theirs <= ours, "the error now matches that of torch: remove it from the table"
        else:
            assert ours, f"allranks returns, but torch raises {theirs}"
            assert theirs <= ours


def test_exception_tables_name_existing_calls() -> None:
    assert set(DIFFERENT) | UNFIT_FOR_GLOO <= set(CALLS)


@pytest.mark.parametrize(
    "name", ["broadcast from rank 2", "send to itself", "new_group with rank 2", "get_rank of a string"]
)
def test_wrong_call_before_init_process_group_raises_the_types_of_torch(name: str) -> None:
    import torch.distributed as peer

    theirs, ours = kinds(raised(CALLS[name], peer)), kinds(raised(CALLS[name], allranks))
    assert theirs <= ours
    assert ours
