"""Where a job runs, from the options and the place: here, on the hosts of a list or of an allocation, or on each host
where the same command was typed; or in place, where this process is a rank of somebody else's job already."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import NoReturn

from allranks._errors import ConfigError
from allranks._host import usable_cpus
from allranks._hostlist import Slots
from allranks._places import Place, detect, read_hosts
from allranks.launch.layout import describe_plan, share_out
from allranks.launch.local import run_here
from allranks.launch.options import Options
from allranks.launch.placement import describe, seats, visible_gpus
from allranks.launch.rank import Rank
from allranks.launch.screen import ensure_standard_streams
from allranks.launch.spread import is_here, join_leader, lead, run_there
from allranks.launch.target import check

__all__ = ["launch"]

_LAUNCHED = ("allranks", "torchrun")  # a rank of ours may start jobs of its own
_PORT = 29500


def launch(options: Options) -> int | Rank:
    """Runs a job.

    Returns:
        The exit code; or, in each of the forked ranks, the rank, which the caller must let ``run``, outside of
        everything that belongs to the launcher.

    Raises:
        ConfigError: the job cannot be started as asked.
    """
    ensure_standard_streams()
    if options.folder is not None:
        try:
            os.chdir(options.folder)
        except OSError as error:
            raise ConfigError(f"cannot enter {str(options.folder)!r} (--chdir): {error.strerror}") from None
    check(options.target)
    if options.iface:
        os.environ["ALLRANKS_IFACE"] = options.iface
    try:
        return _launch(options, detect(os.environ, options.env, launcher=True))
    except KeyboardInterrupt:  # while nothing has been started
        return 128 + signal.SIGINT


def _launch(options: Options, place: Place) -> int | Rank:
    if place.role == "rank" and place.kind not in _LAUNCHED and not options.hosts and options.node is None:
        if options.nproc is None and options.per_host is None:
            _replace_by_target(options)
        raise ConfigError(
            f"this process is rank {place.rank} of {place.size} already, started by {place.kind}; -n would start ranks"
            " in each of them. Leave it out to run the program as that rank, or say --env local"
        )
    if options.hosts or (place.role == "allocation" and options.node is None):
        hosts = options.hosts or read_hosts(place)
        way = place.way if place.role == "allocation" else "ssh"
        if not (len(hosts) == 1 and is_here(hosts[0].name)):
            return run_there(options, hosts, way)
        return _run_here(options, hosts[0])
    nodes = options.nodes or ((place.nodes, place.nodes) if place.role == "node" and place.nodes else None)
    if nodes is not None and nodes[1] > 1:
        return _run_among(options, place, nodes)
    return _run_here(options, Slots("localhost"))


def _run_here(options: Options, host: Slots) -> int | Rank:
    if options.nodes is not None and options.nodes[0] > 1:
        raise ConfigError(f"{options.nodes[0]} hosts were asked for (-N), and there is only {host.name}")
    gpus = len(visible_gpus(os.environ)) if options.per_host == "gpu" else 0
    (nproc,) = share_out([host], options.nproc, options.per_host, [(usable_cpus(), gpus)])
    if options.dry_run:
        print(describe_plan([host.name], [nproc], "from this process", options.target.words()))
        for line in describe(seats(nproc, options.bind, options.one_gpu_per_rank, os.environ)):
            print(f"    {line}")
        return 0
    return run_here(options, nproc)


def _run_among(options: Options, place: Place, nodes: tuple[int, int]) -> int | Rank:
    node = options.node if options.node is not None else place.node
    name, port = options.leader or (place.leader, None)
    if node is None and not name:
        raise ConfigError(
            f"{nodes[1]} hosts were asked for (-N), and neither which they are (--hosts), nor which of them this is"
            " (--node-rank), nor a scheduler says more"
        )
    if node is not None and node >= nodes[1]:
        raise ConfigError(f"--node-rank {node} is out of range; there are {nodes[1]} hosts, numbered from 0")
    ports = [port] if port is not None else [*place.ports] or [_PORT]
    if options.dry_run:
        where = f"{name or 'this host'}, port {', '.join(map(str, ports))}"
        print(f"{options.target.words()}, on this host and {nodes[1] - 1} more, which meet on {where}")
        return 0
    if node == 0 or (node is None and is_here(name)):
        try:
            return lead(options, nodes, name, ports)
        except OSError as error:
            if node == 0 or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on port {ports[0]}: {str(error.strerror).lower()}") from None
    return join_leader(options, node, [(name or "127.0.0.1", port) for port in ports])


def _replace_by_target(options: Options) -> NoReturn:
    target = options.target
    words = [target.name, *target.args]
    if target.is_python:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        words = [sys.executable, *flags, *(["-m"] if target.kind == "module" else []), *words]
    os.execvp(words[0], words)
