"""Where a program becomes a master: `init_master_worker`."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from allranks._base.errors import NotInitializedError, UsageError
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks.launch.ranks.rank import this_rank

if TYPE_CHECKING:
    from allranks.remote.master.keeping import Kept
    from allranks.remote.master.master import Master

__all__ = ["init_master_worker", "keep", "master_of_this_process", "shutdown"]

_TIMEOUT_S = 1800.0  # as of a process group

_master: Master | None = None


def init_master_worker(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    workers: int | None = None,
    hosts: str | Sequence[str] | None = None,
    worker_device: str = "cpu",
    threads: int | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
) -> Master:
    """Makes this process the master of the others: from now on there are the devices ``worker:1``, ``worker:2``, ...

    In a process of another rank than 0 it serves the master, and ends the process (``SystemExit``) when the master
    ends. Everything ends with the master, however that ends.

    Args:
        backend: ``"tcp"`` or ``"native"``, which are one here: master and workers use memory that they share on one
            host, and TCP between hosts. In its place an `init_method` may be given.
        init_method: how the processes of a job find each other, as in ``init_process_group``; ``env://`` by default.
        workers: starts so many on this host instead. For a notebook, or a script without a launcher.
        hosts: starts workers on other hosts instead, by ssh: ``"node1:2,node2"``.
        worker_device: where workers keep their tensors: ``"cpu"``, ``"cuda"``, ``"cuda:0"``.
        threads: of each worker that is started here; a fair share of the CPUs if None.
        timeout: how long to wait for the workers now, and for each answer later: a timedelta or seconds; 30 minutes
            if None.
        world_size: the number of processes, where they are there already; -1: from the environment.
        rank: this process, 0 for the master; -1: from the environment.

    Returns:
        The master: ``mw.group``, ``mw.remote``, ``mw.synchronize``, ``mw.respawn``, ``mw.shutdown``; also a context.

    Raises:
        UsageError: the arguments contradict each other; there is a master already; the name of torch's device for
            others is taken in this process.
        ConfigError: a worker cannot be had: says where and why.
        JoinError: some did not come in time.

    Cost:
        one import of torch on each host, and about 30 ms for each worker.
    """
    from allranks.remote.bootstrap.workers import gather_workers

    if backend is not None and "://" in backend and init_method is None:
        backend, init_method = None, backend
    if backend not in (None, "tcp", "native"):
        raise UsageError(
            f"init_master_worker: backend {backend!r} is none that master and workers can use; expected 'tcp', or none:"
            " init_master_worker(init_method='tcp://host:port', world_size=..., rank=...), or"
            " init_master_worker(workers=4)"
        )
    launched = this_rank()
    elsewhere = (init_method or "").startswith(("tcp://", "file://"))
    if elsewhere and launched is not None and launched.target.mode == "master":
        init_method = "env://"  # the workers that the launcher has started wait there, and nowhere else
    seconds = _TIMEOUT_S if timeout is None else seconds_of(timeout)
    gathered = gather_workers(
        init_method,
        workers=workers,
        hosts=hosts,
        timeout_s=seconds,
        worker_device=worker_device,
        threads=threads,
        world_size=world_size,
        rank=rank,
    )
    try:
        from allranks.remote.master.master import Master
        from allranks.remote.torch_device.device import prove, register

        register()
        made = Master(gathered, seconds)
        prove(made.devices.worker(made.ranks[0]))
    except BaseException:
        gathered.close()
        raise
    global _master
    _master = made
    atexit.register(_end, made)
    return made


def _end(made: Master) -> None:
    """At the end of the program: what is queued is done, unless an exception has ended it."""
    if getattr(sys, "last_value", None) is None:
        made.shutdown()
    else:
        made.close()


def master_of_this_process() -> Master:
    """The master that `init_master_worker` has made.

    Raises:
        NotInitializedError: there is none.
    """
    if _master is not None:
        _master.connections.check_process()
    if _master is None or _master.closed:
        raise NotInitializedError("there are no workers: call allranks.init_master_worker() first")
    return _master


def keep(*things: Any) -> Kept:
    """Marks what outlives the workers that it is on (master-worker mode).

    `Kept.refresh` makes a snapshot. When a worker is lost and has been replaced (`Master.on_lost`, `Master.respawn`),
    everything is as in the last complete snapshot, on all workers and on the master, in the same Python objects.

    Args:
        things: modules (their parameters and buffers), optimizers (their state and options), tensors on workers or on
            the master, dicts and lists of these; numbers in dicts come back, too. Other objects by their `state_dict`
            and `load_state_dict`, as schedulers of learning rates.

    Returns:
        What makes snapshots: ``refresh()``, ``close()``. There is one at a time.

    Raises:
        UsageError: something cannot be kept, or there is another one.
        NotInitializedError: there are no workers.

    Cost:
        none before the first `refresh`.
    """
    return master_of_this_process().keep(*things)


def shutdown() -> None:
    """Ends the workers; see `Master.shutdown`."""
    master_of_this_process().shutdown()


publish(globals())
