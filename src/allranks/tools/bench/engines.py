"""The measured libraries: allranks and its peers, each with its own group of the same processes.

An engine turns a verb and its buffers into a function without arguments, so that the same code times all engines.
Everything that can be prepared is prepared, for all engines: the lists of chunks and, for MPI, the descriptions of the
buffers. mpi4py therefore does not examine tensors in the timed calls.

torch.distributed is a measured peer here, used through its public functions.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import allranks
from allranks._cluster.network import interface_of
from allranks.tools.bench.verbs import ROOT, VERBS

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BenchEngine", "Gloo", "Mpi", "Native"]

Call = Callable[[], object]
Start = Callable[[], Call]  # starts a call; returns the function that waits for it

_MPI_REDUCES = {
    "uint8": "UINT8_T", "int8": "INT8_T", "int16": "INT16_T", "int32": "INT32_T", "int64": "INT64_T",
    "float32": "FLOAT", "float64": "DOUBLE",
}  # fmt: skip
_MPI_OPS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}


class BenchEngine(abc.ABC):
    """A library under measurement."""

    name: str
    settings: str = ""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions to print with the results."""

    @abc.abstractmethod
    def call(self, verb: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Call:
        """Return a function that runs one call.

        Args:
            verb: The call.
            into: The input of this rank.
            out: The output of this rank.
            op: The reduce operation.
        """

    @abc.abstractmethod
    def start(self, what: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Start:
        """Return a function that starts a call without waiting for it, for ``overlap``.

        An ``all_reduce`` reduces ``out``. An ``exchange`` sends ``into`` to the next rank and receives ``out`` from the
        previous rank.
        """

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor for the calls of this engine."""
        return torch.empty(count, dtype=dtype)

    def enter(self, cpus: set[int]) -> None:
        """Prepare for a block of this engine, outside the timed interval. ``cpus`` are the CPUs of the job."""
        os.sched_setaffinity(0, cpus)

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the group of this engine."""


class Native(BenchEngine):
    """allranks."""

    name = "native"

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self.settings = "tensors in shared memory (empty_shared)" if shared else "private tensors"

    def versions(self) -> dict[str, str]:
        return {"allranks": allranks.__version__}

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if not self._shared or not count:
            return super().empty(count, dtype)
        tensor: torch.Tensor = allranks.empty_shared((count,), dtype=dtype)
        return tensor

    def call(self, verb: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Call:
        return _torch_call(allranks, verb, into, out, op)

    def start(self, what: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Start:
        return _torch_start(allranks, what, into, out, op)

    def close(self) -> None:
        allranks.destroy_process_group()


class Gloo(BenchEngine):
    """torch.distributed over gloo. allranks distributes the port of its store, so the user chooses none."""

    name = "gloo"

    def __init__(self, rank: int, ranks: int) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        self._dist = dist
        world = allranks.group.WORLD
        assert world is not None
        single_host = len({member.machine for member in world.members}) == 1
        here = "127.0.0.1" if single_host else world.members[ROOT].addresses[0]
        own_addresses = world.members[rank].addresses
        # Without it, gloo uses the address of the host's name, which can be a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if single_host else interface_of(own_addresses[0]))
        self.settings = f"as torch.distributed sets it up, over {os.environ['GLOO_SOCKET_IFNAME']}"
        # The store must not wait for the other ranks: they receive its port from the broadcast below.
        store = TCPStore(here, 0, is_master=True, wait_for_workers=False) if rank == ROOT else None
        port = torch.tensor([store.port if store else 0])
        allranks.broadcast(port, ROOT)
        store = store or TCPStore(here, int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

    def versions(self) -> dict[str, str]:
        return {"torch (gloo)": str(torch.__version__)}

    def call(self, verb: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Call:
        return _torch_call(self._dist, verb, into, out, op)

    def start(self, what: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Start:
        return _torch_start(self._dist, what, into, out, op)

    def close(self) -> None:
        self._dist.destroy_process_group()


def _torch_call(dist: ModuleType, verb: str, into: torch.Tensor, out: torch.Tensor, op_name: str) -> Call:
    """Return the call for allranks or torch: the same program for both libraries."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op = getattr(dist.ReduceOp, op_name)
    root = rank == ROOT
    if verb == "send":
        return _ping_pong(rank, lambda peer: dist.send(into, peer), lambda peer: dist.recv(out, peer))
    # In torch 2.13, the old names warn and cost more. Older versions have only the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    pieces = list((out if verb == "gather" else into).chunk(ranks)) if root and verb in ("gather", "scatter") else None
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(out, op),
        "reduce": lambda: dist.reduce(out, ROOT, op),
        "broadcast": lambda: dist.broadcast(out, ROOT),
        "all_gather": lambda: gather(out, into),
        "gather": lambda: dist.gather(into, pieces, ROOT),
        "scatter": lambda: dist.scatter(out, pieces, ROOT),
        "reduce_scatter": lambda: reduce_scatter(out, into, op),
        "all_to_all": lambda: dist.all_to_all_single(out, into),
        "barrier": dist.barrier,
    }
    return calls[verb]


def _torch_start(dist: ModuleType, what: str, into: torch.Tensor, out: torch.Tensor, op_name: str) -> Start:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op = getattr(dist.ReduceOp, op_name)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def exchange() -> Call:
        works = [dist.irecv(out, before), dist.isend(into, after)]
        return lambda: [work.wait() for work in works]

    def all_reduce() -> Call:
        wait: Call = dist.all_reduce(out, op, async_op=True).wait
        return wait

    return {"exchange": exchange, "all_reduce": all_reduce}[what]


def _ping_pong(rank: int, send: Callable[[int], object], recv: Callable[[int], object]) -> Call:
    def ping() -> None:
        send(1)
        recv(1)

    def pong() -> None:
        recv(0)
        send(0)

    return (ping, pong, lambda: None)[min(rank, 2)]


class Mpi(BenchEngine):
    """MPI through mpi4py. The processes are children of mpirun (``start``), which has bound them by its defaults.

    While the other engines are measured, the processes are not bound: the threads of gloo would otherwise share the
    core of their rank.
    """

    name = "mpi"

    def __init__(self, mpi: Any, bound: set[int], settings: str) -> None:
        self._mpi, self._comm = mpi, mpi.COMM_WORLD
        self._bound = bound
        self.settings = settings

    def versions(self) -> dict[str, str]:
        import mpi4py

        library = self._mpi.Get_library_version().split(",")[0].strip("\0 \n")
        return {"mpi": library, "mpi4py": mpi4py.__version__}

    def enter(self, cpus: set[int]) -> None:
        os.sched_setaffinity(0, self._bound)

    def close(self) -> None:
        """Do nothing: MPI ends with the process."""

    def call(self, verb: str, into: torch.Tensor, out: torch.Tensor, op_name: str) -> Call:
        mpi, comm, root = self._mpi, self._comm, self._comm.rank == ROOT
        op = getattr(mpi, _MPI_OPS[op_name]) if VERBS[verb].reduces else None
        gives, gets = VERBS[verb].pieces(comm.size)
        source, target = self._describe(into, gives, verb), self._describe(out, gets, verb)
        if verb == "send":
            return _ping_pong(comm.rank, lambda peer: comm.Send(source, peer), lambda peer: comm.Recv(target, peer))
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, target, op),
            "reduce": (
                (lambda: comm.Reduce(mpi.IN_PLACE, target, op, ROOT))
                if root
                else (lambda: comm.Reduce(target, None, op, ROOT))
            ),
            "broadcast": lambda: comm.Bcast(target, ROOT),
            "all_gather": lambda: comm.Allgather(source, target),
            "gather": lambda: comm.Gather(source, target if root else None, ROOT),
            "scatter": lambda: comm.Scatter(source if root else None, target, ROOT),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target, op),
            "all_to_all": lambda: comm.Alltoall(source, target),
            "barrier": comm.Barrier,
        }
        return calls[verb]

    def start(self, what: str, into: torch.Tensor, out: torch.Tensor, op_name: str) -> Start:
        mpi, comm = self._mpi, self._comm
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        op = getattr(mpi, _MPI_OPS[op_name])
        source, target = self._describe(into, 1, "all_reduce"), self._describe(out, 1, "all_reduce")

        def exchange() -> Call:
            requests = [comm.Irecv(target, before), comm.Isend(source, after)]
            return lambda: mpi.Request.Waitall(requests)

        def all_reduce() -> Call:
            wait: Call = comm.Iallreduce(mpi.IN_PLACE, target, op).Wait
            return wait

        return {"exchange": exchange, "all_reduce": all_reduce}[what]

    def prepared(self, out: torch.Tensor, op_name: str) -> Call:
        """Return a persistent all_reduce of ``out``; each call starts it and waits for it."""
        op, target = getattr(self._mpi, _MPI_OPS[op_name]), self._describe(out, 1, "all_reduce")
        request = self._comm.Allreduce_init(self._mpi.IN_PLACE, target, op)

        def call() -> None:
            request.Start()
            request.Wait()

        return call

    def _describe(self, tensor: torch.Tensor, pieces: int, verb: str) -> list[Any]:
        """Return the address, the elements per chunk and the type of a buffer. The caller keeps the tensor alive.

        The type is bytes if the verb does not reduce.
        """
        buffer = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        if VERBS[verb].reduces:
            name = str(tensor.dtype).removeprefix("torch.")
            return [buffer, tensor.numel() // pieces, getattr(self._mpi, _MPI_REDUCES[name])]
        return [buffer, tensor.nbytes // pieces, self._mpi.BYTE]
