"""Methods of torch's groups, with every form of their arguments, valid and invalid."""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as td
from torch import tensor

_C = torch._C._distributed_c10d
_LIMIT = timedelta(seconds=20)


def _mine(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(td.get_rank()))


def _options(kind, **fields):
    made = getattr(_C, f"{kind}Options")()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _kept(work, *tensors):
    """Wait for a call in three ways; return copies of its tensors."""
    work.get_future().wait()
    assert work.wait()
    assert work.wait(_LIMIT)
    assert work.is_completed()
    return [t.clone() if isinstance(t, torch.Tensor) else [each.clone() for each in t] for t in tensors]


def _kind(call):
    """Return the type of the error that a call raises, or "none"."""
    try:
        work = call()
        if work is not None:
            work.wait()
    except Exception as error:  # noqa: BLE001 - any error, but of the same type in both worlds
        return {kind.__name__ for kind in (TypeError, RuntimeError) if isinstance(error, kind)}
    return "none"


def all_reduced():
    pg, results = td.group.WORLD, []
    for form in (
        lambda t: pg.allreduce(t),
        lambda t: pg.allreduce([t]),
        lambda t: pg.allreduce(t, td.ReduceOp.MAX),
        lambda t: pg.allreduce(t, op=td.ReduceOp.MAX),
        lambda t: pg.allreduce(tensor=t, op=td.ReduceOp.PRODUCT, timeout=_LIMIT),
        lambda t: pg.allreduce([t], op=td.ReduceOp.MIN),
        lambda t: pg.allreduce(tensors=[t], op=td.ReduceOp.MIN, timeout=_LIMIT),
        lambda t: pg.allreduce([t], _options("Allreduce", reduceOp=td.ReduceOp.MAX)),
        lambda t: pg.allreduce([t], opts=_options("Allreduce", reduceOp=td.ReduceOp.MAX, timeout=_LIMIT)),
        lambda t: pg.allreduce([t], _options("Allreduce", asyncOp=False)),
        lambda t: pg.allreduce_coalesced([t]),
        lambda t: pg.allreduce_coalesced([t], _options("AllreduceCoalesced", reduceOp=td.ReduceOp.MAX)),
        lambda t: pg.allreduce_coalesced(tensors=[t]),
    ):
        t = _mine(3, 2)
        results.append(_kept(form(t), t))
    pair = [_mine(4), _mine(2, 3)]
    results.append(_kept(pg.allreduce_coalesced(pair), pair))
    twice = [_mine(4)] * 2
    results += [_kept(pg.allreduce_coalesced(twice), twice), pg.allreduce_coalesced(twice).get_future().wait()]
    results.append(_kept(pg.allreduce(none := torch.empty(0)), none))
    return results


def several_tensors_of_a_rank():
    pg, rank, size, results = td.group.WORLD, td.get_rank(), td.get_world_size(), []
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        tensors = [_mine(3), _mine(3) * 2, _mine(3) - 1]
        results.append(_kept(pg.allreduce(tensors, op=getattr(td.ReduceOp, op)), tensors))
    for op in ("BAND", "BOR", "BXOR"):
        tensors = [tensor([6 + rank, 1]), tensor([3, 5 * rank])]
        results.append(_kept(pg.allreduce(tensors, op=getattr(td.ReduceOp, op)), tensors))
    for root in range(size):
        for which in range(2):
            tensors = [_mine(3), _mine(3) + 1]
            opts = _options("Broadcast", rootRank=root, rootTensor=which)
            results.append(_kept(pg.broadcast(tensors, opts), tensors))
    inputs = [tensor([10 * rank + i]) for i in range(3)]
    outputs = [[tensor([-1]) for _ in range(3 * size)] for _ in range(3)]
    results.append(_kept(pg.allgather(outputs, inputs), *outputs))
    results.append(pg.allgather(outputs, inputs).get_future().wait())
    return results


def sparse():
    pg, rank, results = td.group.WORLD, td.get_rank(), []
    for count in (1, 2):
        tensors = [torch.sparse_coo_tensor([[rank, 2 + i]], [1.0, 2.0 + rank], (5,)) for i in range(count)]
        pg.allreduce(tensors).wait()
        results.append([t.to_dense() for t in tensors])
    return results


def from_and_to_a_root():
    pg, rank, size, results = td.group.WORLD, td.get_rank(), td.get_world_size(), []
    for form in (
        lambda t: pg.broadcast(t, 0),
        lambda t: pg.broadcast(t, root=1),
        lambda t: pg.broadcast(tensor=t, root=1, timeout=_LIMIT),
        lambda t: pg.broadcast([t]),
        lambda t: pg.broadcast([t], _options("Broadcast", rootRank=1)),
        lambda t: pg.broadcast([t], opts=_options("Broadcast", rootRank=1, timeout=_LIMIT)),
    ):
        t = _mine(3)
        results.append(_kept(form(t), t))
    for form in (
        lambda t: pg.reduce(t, 0),
        lambda t: pg.reduce(t, root=0, op=td.ReduceOp.MAX),
        lambda t: pg.reduce(t, 0, td.ReduceOp.MAX, _LIMIT),
        lambda t: pg.reduce([t]),
        lambda t: pg.reduce([t], _options("Reduce", reduceOp=td.ReduceOp.PRODUCT)),
    ):
        t = _mine(3)
        form(t).wait()
        results.append(t if rank == 0 else None)
    rows = [torch.empty(3) for _ in range(size)]
    for form in (
        lambda: pg.gather(rows if rank == 0 else [], _mine(3), 0),
        lambda: pg.gather(rows if rank == 0 else [], _mine(3), root=0, timeout=_LIMIT),
        lambda: pg.gather([rows] if rank == 0 else [], [_mine(3)]),
        lambda: pg.gather([rows] if rank == 0 else [], [_mine(3)], opts=_options("Gather")),
    ):
        form().wait()
        results.append([row.clone() for row in rows] if rank == 0 else None)
    for form in (
        lambda t: pg.scatter([t], [list(torch.arange(2.0 * size).chunk(size))] if rank == 0 else []),
        lambda t: pg.scatter(
            [t],
            [list(torch.arange(2.0 * size).chunk(size))] if rank == 1 else [],
            opts=_options("Scatter", rootRank=1, timeout=_LIMIT),
        ),
    ):
        t = torch.empty(2)
        results.append(_kept(form(t), t))
    return results


def gathered_and_scattered_by_all():
    pg, rank, size, results = td.group.WORLD, td.get_rank(), td.get_world_size(), []
    for form in (
        lambda rows: pg.allgather(rows, _mine(3)),
        lambda rows: pg.allgather(rows, _mine(3), _LIMIT),
        lambda rows: pg.allgather(output_tensors=rows, input_tensor=_mine(3), timeout=_LIMIT),
        lambda rows: pg.allgather([rows], [_mine(3)]),
        lambda rows: pg.allgather([rows], [_mine(3)], opts=_options("Allgather", timeout=_LIMIT)),
        lambda rows: pg.allgather_coalesced([[row] for row in rows], [_mine(3)]),
    ):
        rows = [torch.empty(3) for _ in range(size)]
        results.append(_kept(form(rows), rows))
    for form in (
        lambda flat: pg._allgather_base(flat, _mine(3)),
        lambda flat: pg._allgather_base(flat, _mine(3), _options("Allgather", timeout=_LIMIT)),
        lambda flat: pg.allgather_into_tensor_coalesced([flat], [_mine(3)]),
        lambda flat: pg.allgather_into_tensor_coalesced([flat], [_mine(3)], opts=_options("Allgather")),
    ):
        flat = torch.empty(3 * size)
        results.append(_kept(form(flat), flat))
    highest = _options("ReduceScatter", reduceOp=td.ReduceOp.MAX)
    for form in (
        lambda part: pg.reduce_scatter(part, list(_mine(2 * size).chunk(size))),
        lambda part: pg.reduce_scatter(part, list(_mine(2 * size).chunk(size)), td.ReduceOp.MAX, _LIMIT),
        lambda part: pg.reduce_scatter([part], [list(_mine(2 * size).chunk(size))]),
        lambda part: pg.reduce_scatter([part], [list(_mine(2 * size).chunk(size))], highest),
        lambda part: pg._reduce_scatter_base(part, _mine(2 * size)),
        lambda part: pg._reduce_scatter_base(part, _mine(2 * size), highest),
        lambda part: pg.reduce_scatter_tensor_coalesced([part], [_mine(2 * size)]),
        lambda part: pg.reduce_scatter_tensor_coalesced([part], [_mine(2 * size)], highest),
    ):
        part = torch.empty(2)
        form(part).wait()  # gloo provides no futures of these calls
        results.append(part)
    splits = [1 + rank] * size, [1, 2]
    for shape, form in (
        (4, lambda flat: pg.alltoall_base(flat, _mine(4), [], [])),
        (2 + 2 * rank, lambda flat: pg.alltoall_base(flat, _mine(3), *splits)),
        (2 + 2 * rank, lambda flat: pg.alltoall_base(flat, _mine(3), *splits, timeout=_LIMIT)),
        (2 + 2 * rank, lambda flat: pg.alltoall_base(flat, _mine(3), *splits, opts=_options("AllToAll"))),
    ):
        flat = torch.empty(shape)
        results.append(_kept(form(flat), flat))
    return results


def barriers_and_messages():
    pg, rank, results = td.group.WORLD, td.get_rank(), []
    for form in (
        lambda: pg.barrier(),
        lambda: pg.barrier(timeout=_LIMIT),
        lambda: pg.barrier(_options("Barrier", timeout=_LIMIT)),
        lambda: pg.barrier(opts=_options("Barrier", asyncOp=False)),
    ):
        assert form().wait()
    for form in (
        lambda t: pg.send([t], 1, 3) if rank == 0 else pg.recv([t], 0, 3),
        lambda t: pg.send([t], dstRank=1, tag=3) if rank == 0 else pg.recv([t], srcRank=0, tag=3),
        lambda t: pg.send(tensors=[t], dstRank=1, tag=4) if rank == 0 else pg.recv_anysource([t], 4),
        lambda t: pg.send([t], 1, 0) if rank == 0 else pg.recv_anysource([t], 0),
    ):
        t = _mine(3)
        work = form(t)
        work.wait()
        results.append((t, work.is_completed()))
    return results


def wrong_forms():
    """Return the error types of invalid calls, which must equal those of gloo."""
    pg, rank, size = td.group.WORLD, td.get_rank(), td.get_world_size()
    a, b, c = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    there = (rank + 1) % size
    return [
        _kind(partial(call, pg))
        for call in (
            lambda pg: pg.allreduce("a"),
            lambda pg: pg.allreduce(a, 1, 2, 3),
            lambda pg: pg.allreduce(a, opp=td.ReduceOp.MAX),
            lambda pg: pg.allreduce([a], timeout=3.0),
            lambda pg: pg.allreduce(["a"]),
            lambda pg: pg.allreduce(),
            lambda pg: pg.allreduce([]),
            lambda pg: pg.allreduce([a, b]),
            lambda pg: pg.allreduce([a, c]),
            lambda pg: pg.broadcast(a),
            lambda pg: pg.broadcast([]),
            lambda pg: pg.broadcast(a, -1),
            lambda pg: pg.broadcast(a, size),
            lambda pg: pg.broadcast([a, b]),
            lambda pg: pg.broadcast([a], _options("Broadcast", rootTensor=1)),
            lambda pg: pg.broadcast([a], _options("Broadcast", rootTensor=-1)),
            lambda pg: pg.reduce(a),
            lambda pg: pg.reduce([a, a]),
            lambda pg: pg.reduce(a, size),
            lambda pg: pg.gather([], [a], _options("Gather", rootRank=rank)),
            lambda pg: pg.gather([], [], _options("Gather", rootRank=rank)),
            lambda pg: pg.gather([[a] * (size + 1)], [a], _options("Gather", rootRank=rank)),
            lambda pg: pg.gather([[b] * size], [a], _options("Gather", rootRank=rank)),
            lambda pg: pg.gather([[c] * size], [a], _options("Gather", rootRank=rank)),
            lambda pg: pg.gather([[a] * size], [a], _options("Gather", rootRank=there)),
            lambda pg: pg.scatter([a], [], _options("Scatter", rootRank=rank)),
            lambda pg: pg.scatter([a, a], [], _options("Scatter", rootRank=there)),
            lambda pg: pg.scatter([a], [[a] * (size - 1)], _options("Scatter", rootRank=rank)),
            lambda pg: pg.scatter([a], [[b] * size], _options("Scatter", rootRank=rank)),
            lambda pg: pg.scatter([a], [[a] * size], _options("Scatter", rootRank=there)),
            lambda pg: pg.scatter([a], [[a] * size], _options("Scatter", rootRank=-1)),
            lambda pg: pg.allgather([], []),
            lambda pg: pg.allgather([], [a]),
            lambda pg: pg.allgather([[a] * (size - 1)], [a]),
            lambda pg: pg.allgather([[b] * size], [a]),
            lambda pg: pg.allgather([[c] * size], [a]),
            lambda pg: pg.allgather([[a] * 2 * size] * 2, [a, b]),
            lambda pg: pg.allgather_coalesced([[a]] * (size + 1), [a]),
            lambda pg: pg.allgather_coalesced([[c]] + [[a]] * (size - 1), [a]),
            lambda pg: pg.allgather_coalesced([[b]] + [[a]] * (size - 1), [a]),
            lambda pg: pg.allreduce_coalesced([]),
            lambda pg: pg.allreduce_coalesced([a, b]),
            lambda pg: pg.allreduce_coalesced([a, a.to_sparse()]),
            lambda pg: pg.allreduce_coalesced([a.to_sparse()]),
            lambda pg: pg.alltoall_base(a, a, [7], []),
            lambda pg: pg.send(a, there, 0),
            lambda pg: pg.send([a]),
            lambda pg: pg.send([a], rank, 0),
            lambda pg: pg.barrier(3),
        )
    ]


def words_of_errors():
    """Check that errors contain the message of gloo, because programs can search for it."""
    pg, rank, size = td.group.WORLD, td.get_rank(), td.get_world_size()
    a, b, c = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    found = []
    for words, call in (
        ("invalid root rank", lambda: pg.broadcast(a, -1)),
        ("invalid root rank", lambda: pg.broadcast(a, size)),
        ("invalid root rank", lambda: pg.reduce(a, size)),
        ("invalid root rank", lambda: pg.gather([], [a], _options("Gather", rootRank=size))),
        ("invalid root rank", lambda: pg.scatter([a], [], _options("Scatter", rootRank=size))),
        ("invalid tensor type", lambda: pg.gather([[b] * size], [a], _options("Gather", rootRank=rank))),
        ("invalid tensor size", lambda: pg.gather([[c] * size], [a], _options("Gather", rootRank=rank))),
        ("invalid tensor type", lambda: pg.scatter([a], [[b] * size], _options("Scatter", rootRank=rank))),
        ("invalid tensor size", lambda: pg.scatter([a], [[c] * size], _options("Scatter", rootRank=rank))),
        ("invalid output tensor list", lambda: pg.allgather([[a] * (size - 1)], [a])),
        ("invalid tensor type", lambda: pg.allgather([[b] * size], [a])),
        ("invalid tensor size", lambda: pg.allgather([[c] * size], [a])),
        ("invalid size of output tensor at index 0", lambda: pg.allgather_coalesced([[c]] * size, [a])),
        ("invalid tensor type at index 0", lambda: pg.allgather_coalesced([[b]] * size, [a])),
        ("output lists should be equal to world size", lambda: pg.allgather_coalesced([[a]] * (size + 1), [a])),
        ("tensors must all have the same type", lambda: pg.allreduce_coalesced([a, b])),
        ("unsupported reduction operation", lambda: pg.allreduce(a.to_sparse(), td.ReduceOp.MAX)),
    ):
        try:
            call()
        except RuntimeError as error:
            found.append(words in str(error) or str(error))
    return found
