"""``allranks.run``: a job in which every rank calls one function, and whose results return to the caller.

The caller's process only controls the job. It never forks itself, because torch, threads and GPUs may be in use there.
An agent imports torch once and forks the ranks, as for ``allranks run``. It is a separate process on this host, or one
on each of several hosts.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar, get_args

from allranks._base.errors import ConfigError, RankError, TimeoutError, UsageError, rank_list
from allranks._base.public import publish
from allranks._cluster.detection import command_for, detect, read_hosts
from allranks._cluster.env import notice_seconds
from allranks._cluster.host import visible_gpus
from allranks._cluster.hostlist import Slots, parse_hosts
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks._cluster.schedulers.ssh import SSH
from allranks.launch.arguments.layout import share_out
from allranks.launch.jobs.multi_host import MultiHostJob
from allranks.launch.ranks.function import name_of, pack, unpack_error, unpack_result
from allranks.launch.reporter import Reporter
from allranks.launch.spec.options import Bind, Display, Options, Show
from allranks.launch.spec.target import Target

__all__ = ["output_streams", "run"]

R = TypeVar("R")

_JOIN_S = 300.0  # seconds; the default of ``--join-timeout``


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n: int | None = None,
    hosts: str | Sequence[str] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    bind: Bind = "none",
    show: Show = "all",
    quiet: bool = False,
    progress: bool = False,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``n`` ranks, each a separate process, and return the results.

    In ``fn``, ``init_process_group()`` without arguments joins the ranks; the environment is that of ``allranks run``.
    It works in scripts (which need no ``if __name__ == "__main__"``), in notebooks and in threads. ``fn`` may be
    defined there, be a lambda or have a closure. The ranks find the modules of ``fn`` in the caller's search path. The
    output of the ranks appears in ``sys.stdout`` and ``sys.stderr``, with their numbers as prefixes. Ctrl-C stops all
    ranks. If this process exits for any reason, the ranks stop, too.

    Args:
        fn: the function. The ranks receive copies of it, of its arguments and of the globals that it uses.
        args: its arguments.
        kwargs: its keyword arguments.
        n: number of ranks. If None, as many as ``hosts`` or the allocation have. Without these, one for each GPU of
            this host, or for each usable CPU if there is no GPU.
        hosts: the hosts: ``"node0:2,node1"`` or ``["node0:2", "node1"]``, with the greatest number of ranks on each,
            reached by ssh. If None, the hosts of this process's allocation, if it has several hosts; else this host.
        timeout: seconds for the whole call, including the start; None for no limit. Ranks that a KeyboardInterrupt does
            not stop are killed 10 s later.
        env: additional environment variables for the ranks.
        threads: threads per rank; if None, OMP_NUM_THREADS or a fair share of the CPUs.
        bind: ``"core"`` gives each rank its own cores; ``"numa"`` gives it the cores of a NUMA node.
        show: the ranks whose output is shown: ``"all"``, ``"0"`` (rank 0, without a number) or ``"none"``.
        quiet: omit the launcher's own remarks.
        progress: show a bar in a notebook or on a terminal. It shows the run time of the job and the number of running
            ranks. If ``fn`` has a loop of ``allranks.progress``, it also shows the progress of the slowest rank.
            Elsewhere no bar is shown.

    Returns:
        The result of ``fn``, by rank. Tensors on GPUs are returned on the CPU.

    Raises:
        Exception: the exception that ``fn`` raised on the rank that failed first, if it can be pickled. Its
            ``__cause__`` is a RankError with rank, host and traceback.
        RankError: that rank raised another exception, or exited, or was killed; or its host was lost.
        TimeoutError: some ranks did not finish in time; with the source lines that they were executing.
        ConfigError: a host or the number of ranks is not available.
        UsageError: ``fn``, an argument or a result cannot be pickled.
        OSError: the output of the ranks cannot be written.
        KeyboardInterrupt: Ctrl-C.

    Cost:
        one import of torch, then about 10 ms for each rank. A result is copied about ten times on its way: 100 MB take
        about 1 s.

    Example:
        >>> import allranks, os
        >>> allranks.run(lambda: int(os.environ["RANK"]) ** 2, n=3)
        [0, 1, 4]

    Source:
        cloudpickle for the pickled data; concurrent.futures.process for an exception that carries a remote traceback.
    """
    began = time.monotonic()
    until = None if timeout is None else began + timeout
    if n is not None and (not isinstance(n, int) or n < 1):
        raise UsageError(f"run: n={n!r}: expected a number of ranks, 1 or more")
    if threads is not None and threads < 1:
        raise UsageError(f"run: threads={threads}: expected 1 or more")
    for name, word, words in (("show", show, get_args(Show)), ("bind", bind, get_args(Bind))):
        if word not in words:
            raise UsageError(f"run: {name}={word!r} is not one of {', '.join(map(repr, words))}")
    if bad := [name for name in env or () if not name or "=" in name]:
        raise UsageError(f"run: env: {bad[0]!r} is not a variable name")
    if not callable(fn):
        raise UsageError(f"run: fn={fn!r}: expected a function")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise UsageError(f"run: args={args!r}: expected a tuple of the arguments; for a single argument, (x,)")
    used, command = _hosts(hosts)
    here = command is None
    options = Options(
        notice_s=notice_seconds(os.environ),
        target=Target("function", name_of(fn), payload=pack(fn, args, kwargs or {})),
        nproc=n,
        per_host=("gpu" if len(visible_gpus(os.environ)) else "auto") if n is None and here else None,
        hosts=used,
        display=Display(show=show),
        threads=threads,
        exports=tuple(f"{name}={value}" for name, value in (env or {}).items()),
        join_timeout_s=_JOIN_S if timeout is None else min(timeout, _JOIN_S),
        reporter=Reporter("allranks.run", quiet),
        signals=(),  # the caller itself handles all signals that do not stop the job
        bind=bind,
    )
    if options.per_host is None:
        counts = share_out(used, n, None)
        used = tuple(host for host, count in zip(used, counts, strict=True) if count)
    job = MultiHostJob(options, len(used), len(used), streams=output_streams(), until=until, progress=progress)
    try:
        job.start_agents(command or SSH, used)
        code = job.run()
    except ConfigError as error:
        if until is not None and time.monotonic() >= until:
            raise TimeoutError(
                f"{options.target.name} did not start on all ranks within {timeout:g} s.\n"
                "  Increase timeout=, which includes the start of the ranks."
            ) from error
        raise
    finally:
        job.close()
    return _outcome(job, code, timeout)


def _outcome(job: MultiHostJob, code: int, timeout: float | None) -> list[Any]:
    """Return the results, by rank, or raise the error of the job."""
    loop, name = job.loop, job.options.target.name
    assert loop is not None
    # Before ``last_signal`` and ``signalled``: the timeout itself stops the ranks by SIGINT.
    if loop.late:
        places = "".join(f"\n  {rank_list(ranks)}: at {where}" for where, ranks in loop.places.items())
        raise TimeoutError(f"{name} did not return on all ranks within {timeout:g} s{places}")
    if loop.last_signal is not None:
        signal.raise_signal(loop.last_signal)  # for the previous handler; this usually does not return
    if loop.signalled == signal.SIGPIPE:
        raise BrokenPipeError(f"{name}: the reader of the ranks' output has closed it")
    if loop.signalled is not None:
        raise KeyboardInterrupt(f"{name} was stopped by {signal.Signals(loop.signalled).name}")
    if (cause := loop.cause) is not None:
        lines = loop.summary.decode(errors="replace").split("\n")
        reason = RankError("\n".join(line.removeprefix(job.options.reporter.line("")) for line in lines), cause.rank)
        error = unpack_error(cause.report.error) if cause.report is not None else None
        if error is None:
            raise reason
        raise error from reason
    if code:
        raise OSError(f"{name}: the output of the ranks could not be written; the ranks were stopped")
    results = []
    for rank in range(job.world_size):
        if rank not in loop.results:
            raise RankError(
                f"rank {rank} exited with code 0 before {name} returned.\n"
                "  Return from it instead of calling os._exit().",
                rank,
            )
        results.append(unpack_result(loop.results.pop(rank), rank))
    return results


def _hosts(hosts: str | Sequence[str] | None) -> tuple[tuple[Slots, ...], RemoteCommand | None]:
    """Return the hosts, and the command that starts agents on them; None for this host alone."""
    if hosts is not None:
        return parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts), "hosts"), SSH
    place = detect(os.environ, launcher=True)
    if place.role == "allocation" and len(found := read_hosts(place)) > 1:
        return found, command_for(place)
    return (Slots(socket.gethostname()),), None


def output_streams() -> tuple[TextIO | None, TextIO | None] | None:
    """Return the streams for output; None for this process's own descriptors, which support more."""
    streams = (sys.stdout, sys.stderr)
    try:
        own = tuple(stream.fileno() for stream in streams) == (1, 2) and streams == (sys.__stdout__, sys.__stderr__)
    except (AttributeError, OSError, ValueError):
        own = False
    if not own:
        return streams
    for stream in streams:
        # The launcher writes to the descriptors, and earlier text must precede its output.
        stream.flush()
    return None


publish(globals())
