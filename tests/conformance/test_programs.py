"""Random programs give equal values under torch.distributed on gloo and under allranks, in the same processes.

hypothesis generates the programs. allranks runs them on the native engine (with shared memory), on tcp and on gloo. In
jobs that mpirun starts, it runs them on mpi.

gloo requires contiguous tensors. The test therefore passes contiguous tensors to gloo, and tensors of the same values
in other layouts to allranks. Every run uses the same programs. If PROGRAMS is set, the test generates this number of
new programs: PROGRAMS=2000 pytest ...
"""

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import allranks
from support.mpi_jobs import python_with, run_by_mpi
from support.workers import Workers

# Dtypes that gloo reduces with the same results as allranks. Gloo lacks int16 and gather of complex numbers, and it
# sums bools as bytes.
NUMBERS = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
# These verbs need at least one dimension: gloo rejects scalars, and a scalar crashes its reduce_scatter_tensor.
BY_ROWS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "ring",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)
SYNCHRONOUS = ("all_gather_object", "broadcast_object_list", "scatter_object_list")
ENGINES = ("native", "tcp", "gloo")
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a program.

    ``waited`` is "no" (a blocking call), "at once" (the rank waits immediately) or "last" (it waits after all calls).
    """

    verb: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    op: str
    root: int
    group: str
    waited: str
    seed: int


@st.composite
def steps(draw: st.DrawFn, ranks: int) -> Step:
    verb = draw(st.sampled_from(REDUCING + MOVING))
    sizes = st.sampled_from([1, 2, 0, 3, 7, 40])
    return Step(
        verb=verb,
        dtype=draw(st.sampled_from(NUMBERS if verb in REDUCING else (*NUMBERS, "bool"))),
        shape=tuple(draw(st.lists(sizes, min_size=verb in BY_ROWS, max_size=3))),
        layout=draw(st.sampled_from(LAYOUTS)),
        op=draw(st.sampled_from(["SUM", "MIN", "MAX", "PRODUCT"])),
        root=draw(st.integers(0, ranks - 1)),
        group=draw(st.sampled_from(["world", "some"] if ranks > 2 else ["world"])),
        waited="no" if verb in SYNCHRONOUS else draw(st.sampled_from(["no", "at once", "last"])),
        seed=draw(st.integers(0, 7)),
    )


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the same values in another memory layout."""
    if layout == "transposed" and values.dim() >= 2:
        return values.mT.contiguous().mT
    if layout == "strided":
        return torch.stack([values, torch.ones_like(values)], -1)[..., 0]
    if layout == "offset":
        around = torch.ones(3, dtype=values.dtype)
        return torch.cat([around, values.flatten(), around])[3 : 3 + values.numel()].view(values.shape)
    return values.clone()


def call(dist: Any, step: Step, group: Any) -> tuple[Any, list[Tensor]]:
    """Make one call; return its Work or None, and the tensors that it writes."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root, wait, dtype = step.root % size, step.waited != "no", getattr(torch, step.dtype)
    layout = step.layout if dist is allranks else "contiguous"
    op = getattr(dist.ReduceOp, step.op)

    def values(shape: tuple[int, ...], i: int = 0) -> Tensor:
        """Return small integers, which are exact in every dtype and order of summation."""
        generator = torch.Generator().manual_seed(step.seed * 100 + rank * 10 + i)
        return laid_out(torch.randint(0, 3, shape, generator=generator).to(dtype), layout)

    mine = values(step.shape)
    pieces = [values(step.shape, i) for i in range(size)]
    outputs = [laid_out(torch.zeros(step.shape, dtype=dtype), layout) for _ in range(size)]
    here = rank == root
    match step.verb:
        case "all_reduce":
            return dist.all_reduce(mine, op, group=group, async_op=wait), [mine]
        case "all_reduce_coalesced":
            return dist.all_reduce_coalesced(pieces, op, group=group, async_op=wait), pieces
        case "reduce":
            work = dist.reduce(mine, group_dst=root, op=op, group=group, async_op=wait)
            return work, [mine] if here else []  # on other ranks gloo leaves undefined values
        case "broadcast":
            return dist.broadcast(mine, group_src=root, group=group, async_op=wait), [mine]
        case "all_gather":
            return dist.all_gather(outputs, mine, group=group, async_op=wait), outputs
        case "all_gather_into_tensor":
            whole = laid_out(torch.zeros((size * step.shape[0], *step.shape[1:]), dtype=dtype), layout)
            return dist.all_gather_into_tensor(whole, mine, group=group, async_op=wait), [whole]
        case "gather":
            work = dist.gather(mine, outputs if here else None, group_dst=root, group=group, async_op=wait)
            return work, outputs if here else []
        case "scatter":
            work = dist.scatter(mine, pieces if here else None, group_src=root, group=group, async_op=wait)
            return work, [mine]
        case "reduce_scatter":
            return dist.reduce_scatter(mine, pieces, op, group=group, async_op=wait), [mine]
        case "reduce_scatter_tensor":
            whole = values((size * step.shape[0], *step.shape[1:]))
            return dist.reduce_scatter_tensor(mine, whole, op, group=group, async_op=wait), [mine]
        case "all_to_all":
            return dist.all_to_all(outputs, pieces, group=group, async_op=wait), outputs
        case "all_to_all_single":
            rows = [[(sender * 2 + receiver + step.seed) % 3 for receiver in range(size)] for sender in range(size)]
            arriving = [rows[sender][rank] for sender in range(size)]
            output = laid_out(torch.zeros((sum(arriving), *step.shape[1:]), dtype=dtype), layout)
            given = values((sum(rows[rank]), *step.shape[1:]))
            work = dist.all_to_all_single(output, given, arriving, rows[rank], group=group, async_op=wait)
            return work, [output]
        case "ring":
            sending = dist.isend(mine, group_dst=(rank + 1) % size, group=group, tag=step.seed)
            receiving = dist.irecv(outputs[0], group_src=(rank - 1) % size, group=group, tag=step.seed)
            sending.wait()
            return receiving, [outputs[0]]
        case "all_gather_object":
            objects: list[Any] = [None] * size
            dist.all_gather_object(objects, mine.tolist(), group=group)
        case "broadcast_object_list":
            objects = [rank, mine.tolist()]
            dist.broadcast_object_list(objects, group_src=root, group=group)
        case "scatter_object_list":
            objects = [None]
            given_objects = [piece.tolist() for piece in pieces] if here else None
            dist.scatter_object_list(objects, given_objects, group_src=root, group=group)
    return None, [torch.tensor(o, dtype=torch.float64) for o in objects]


def run(dist: Any, program: list[Step], groups: dict[str, Any]) -> list[list[Tensor]]:
    """Run the program; return the results of each step, or an empty list if this rank is not in the step's group."""
    results, pending = [], []
    for step in program:
        group = groups[step.group]
        if dist.get_rank(group) < 0:
            results.append([])
            continue
        work, written = call(dist, step, group)
        results.append(written)
        if work is not None:
            if step.waited == "last":
                pending.append(work)
            else:
                work.wait()
    for work in reversed(pending):
        work.wait()
    return results


def difference(groups: Any, request: tuple[str, list[Step]]) -> str:
    """Return a description of the first result on this rank that differs from gloo's, or "" if none differs."""
    import torch.distributed as peer

    engine, program = request

    expected = run(peer, program, groups["peer"])
    actual = run(allranks, program, groups[engine])
    for step, theirs, ours in zip(program, expected, actual, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, b):
                return f"{step}: {a} is not {b}"
    return ""


@pytest.fixture(scope="module", params=[2, 3, 4])
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[int, Workers]]:
    made = Workers(request.param, difference)
    yield request.param, made
    made.close()


@pytest.fixture(scope="module", params=[("openmpi", 3), ("mpich", 4)], ids=str)
def mpi_workers(request: pytest.FixtureRequest) -> Iterator[tuple[int, Workers]]:
    mpi, ranks = request.param
    python_with(mpi)
    made = Workers(ranks, difference, partial(run_by_mpi, mpi))
    yield ranks, made
    made.close()


def tries(by_itself: int) -> settings:
    """Return settings for this number of programs, or for the number in PROGRAMS."""
    return settings(
        max_examples=int(os.environ.get("PROGRAMS", by_itself)),
        derandomize="PROGRAMS" not in os.environ,
        database=None,
    )


@tries(120)
@given(data=st.data())
def test_equal_values(workers: tuple[int, Workers], data: st.DataObject) -> None:
    ranks, asked = workers
    program = data.draw(st.lists(steps(ranks), min_size=1, max_size=8))
    assert asked.ask((data.draw(st.sampled_from(ENGINES)), program)) == [""] * ranks


@tries(30)
@given(data=st.data())
def test_equal_values_on_mpi(mpi_workers: tuple[int, Workers], data: st.DataObject) -> None:
    ranks, asked = mpi_workers
    program = data.draw(st.lists(steps(ranks), min_size=1, max_size=8))
    assert asked.ask(("mpi", program)) == [""] * ranks
