"""The start of a master: `init_master_worker`."""

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
    from allranks.remote.master.master import Master
    from allranks.remote.master.snapshots import Kept

__all__ = ["init_master_worker", "keep", "master_of_this_process", "shutdown"]

_TIMEOUT_S = 1800.0  # the same default as for a process group

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
    """Make this process the master of the others. It then has the devices ``worker:1``, ``worker:2``, ...

    In a process with another rank than 0, the call serves the master, and exits the process (``SystemExit``) when the
    master terminates. All processes terminate with the master, for whatever reason it terminates.

    Args:
        backend: ``"tcp"`` or ``"native"``, which have the same effect here: master and workers use shared memory on one
            host, and TCP between hosts. An `init_method` may be passed in its place.
        init_method: How the processes of a job find each other, as in ``init_process_group``. The default is
            ``env://``.
        workers: The number of workers to start on this host instead. For a notebook, or a script without a launcher.
        hosts: The hosts on which to start workers by ssh instead: ``"node1:2,node2"``.
        worker_device: The device of the workers' tensors: ``"cpu"``, ``"cuda"``, ``"cuda:0"``.
        threads: The threads of each worker that is started here. None: a fair share of the CPUs.
        timeout: Time limit for the start of the workers, and for each answer: a timedelta or seconds. None: 30 minutes.
        world_size: The number of processes, if they already exist. -1: from the environment.
        rank: The rank of this process, 0 for the master. -1: from the environment.

    Returns:
        The master: ``mw.group``, ``mw.remote``, ``mw.synchronize``, ``mw.respawn``, ``mw.shutdown``; also a context
        manager.

    Raises:
        UsageError: The arguments contradict each other, this process already has a master, or another library uses
            torch's device for extensions in this process.
        ConfigError: A worker cannot be started. The message names the place and the reason.
        JoinError: Some workers did not connect in time.

    Cost:
        One import of torch on each host, and about 30 ms for each worker.
    """
    from allranks.remote.bootstrap.workers import gather_workers

    if backend is not None and "://" in backend and init_method is None:
        backend, init_method = None, backend
    if backend not in (None, "tcp", "native"):
        raise UsageError(
            f"init_master_worker: master and workers cannot use backend {backend!r}; expected 'tcp' or no backend.\n"
            "  Call init_master_worker(init_method='tcp://host:port', world_size=..., rank=...) or"
            " init_master_worker(workers=4)."
        )
    launched = this_rank()
    elsewhere = (init_method or "").startswith(("tcp://", "file://"))
    if elsewhere and launched is not None and launched.target.mode == "master":
        init_method = "env://"  # the workers that the launcher has started only wait there
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
    except BaseException:  # also Ctrl-C: the workers must not outlive a failed start
        gathered.close()
        raise
    global _master
    _master = made
    # atexit calls the last function first: `_end` runs before `Workers.close`, while the connections are open.
    atexit.register(_end, made)
    return made


def _end(made: Master) -> None:
    """Finish at the exit of the program: execute queued commands, unless an exception has ended the program."""
    # Python sets `sys.last_value` for an uncaught exception, before it calls the functions of atexit.
    if getattr(sys, "last_value", None) is None:
        made.shutdown()
    else:
        made.close()


def master_of_this_process() -> Master:
    """Return the master that `init_master_worker` has created.

    Raises:
        NotInitializedError: This process has no master.
    """
    if _master is not None:
        _master.connections.check_process()
    if _master is None or _master.closed:
        raise NotInitializedError("this process has no workers.\n  Call allranks.init_master_worker() first.")
    return _master


def keep(*things: Any) -> Kept:
    """Mark objects that must outlive the workers that store them (master-worker mode).

    `Kept.refresh` makes a snapshot. When a lost worker has been replaced (`Master.on_lost`, `Master.respawn`), all kept
    objects have the state of the last complete snapshot. This applies to all workers and to the master, and the Python
    objects stay the same.

    Args:
        things: Modules (their parameters and buffers), optimizers (their state and options), tensors on workers or on
            the master, dicts and lists of these. Numbers in dicts are restored, too. Other objects, such as learning
            rate schedulers, are kept by their `state_dict` and `load_state_dict`.

    Returns:
        The object that makes snapshots: ``refresh()``, ``close()``. Only one can exist at a time.

    Raises:
        UsageError: An object cannot be kept, or another `Kept` exists.
        NotInitializedError: This process has no workers.

    Cost:
        None before the first `refresh`.
    """
    return master_of_this_process().keep(*things)


def shutdown() -> None:
    """Terminate the workers. See `Master.shutdown`."""
    master_of_this_process().shutdown()


publish(globals())
