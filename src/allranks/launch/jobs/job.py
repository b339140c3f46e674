"""Selects how a job runs, from the options and the place of this process.

A job runs here, on the hosts of a list or of an allocation, or on each host that runs the same command. If this process
is already a rank of another launcher's job, the program runs in place.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from dataclasses import fields

from allranks._base.console import interruptible, put
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import STOPPED
from allranks._cluster.context import PORTS_TRIED, LaunchContext, job_ports, job_secret, with_domain
from allranks._cluster.detection import command_for, detect, read_hosts
from allranks._cluster.host import usable_cpus, visible_gpus
from allranks._cluster.hostlist import Slots
from allranks._cluster.network import published_addresses
from allranks._cluster.outer_job import begin_inner_job
from allranks._cluster.schedulers.ssh import SSH
from allranks._net.secret import load_secret
from allranks.launch.arguments.layout import describe_plan, share_out
from allranks.launch.jobs.local import run_here
from allranks.launch.jobs.multi_host import is_this_host, join_leader, lead, run_on_hosts
from allranks.launch.jobs.rehearsal import rehearse
from allranks.launch.ranks.placement import cpu_places_of, describe
from allranks.launch.ranks.rank import Rank
from allranks.launch.spec.declared import declarations, option_name
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import check

__all__ = ["launch"]

_LAUNCHED = ("allranks", "torchrun")  # a rank of these launchers may start its own jobs
# The default port of torchrun.
_PORT = 29500
# Command-line spellings of options that are not declared fields (`spec/options`).
_SPELLINGS = {
    "leader": "--master-addr or --rdzv-endpoint",
    "leads": "--rdzv-conf is_host",
    "run": "--rdzv-id",
    "last_call_s": "--rdzv-conf last_call_timeout",
    "statistics": "--stats or --metrics",
}
_IN_PLACE = ("target", "reporter", "display")  # each field of ``display`` is checked separately


def launch(options: Options) -> int | Rank:
    """Run a job.

    Returns:
        The exit code; or, in each of the forked ranks, the rank. The caller must call its ``run``, outside of
        everything that belongs to the launcher.

    Raises:
        ConfigError: the job cannot be started with these options.
    """
    begin_inner_job(os.environ)
    if options.rehearse and not options.dry_run:
        _check_single_host(options)
        return rehearse(options.rehearse)
    if options.folder is not None:
        try:
            os.chdir(options.folder)
        except OSError as error:
            raise ConfigError(f"cannot enter {str(options.folder)!r} (--chdir): {error.strerror}") from None
    if options.trace is not None and not options.dry_run:
        try:
            options.trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {str(options.trace)!r} (--trace): {error.strerror}") from None
        # If several launchers run the same command, another one may have started already.
        if options.node in (None, 0) and any(options.trace.glob("rank-*.trace")):
            options.reporter.remark(
                f"--trace {options.trace}: the folder has files of another job. A timeline of it shows both jobs.\n"
                "  To separate them, use another folder."
            )
    check(options.target, "--" if options.reporter.name == "allranks run" else "--no-python")
    if options.iface:
        os.environ["ALLRANKS_IFACE"] = options.iface
        if not options.hosts:  # other hosts have other interfaces
            # Raises an error now if no interface matches.
            published_addresses()
    try:
        place = detect(os.environ, options.env, launcher=True)
        because = ", ".join(f"{clue.name}={clue.value}" for clue in place.why)
        options.reporter.detail(
            f"detected {place.kind}: {because}" if because else "detected no scheduler and no other launcher"
        )
        return _launch(options, place)
    except KeyboardInterrupt:  # while hosts were being connected
        options.reporter.report("stopped by SIGINT")
        return STOPPED


def _check_single_host(options: Options) -> None:
    """Raise if the job would not run on this host alone.

    Raises:
        ConfigError: a rehearsal cannot be done there.
    """
    place = detect(os.environ, options.env, launcher=True)
    listed = options.hosts or (read_hosts(place) if place.role == "allocation" else ())
    nodes = options.nodes[1] if options.nodes is not None else place.nodes if place.role == "node" else 1
    if (
        len(listed) > 1
        or any(not is_this_host(host.name) for host in listed)
        or (nodes or 1) > 1
        or options.node is not None
    ):
        raise ConfigError(
            "--rehearse runs on one host only.\n  Start it on one host, with fewer ranks: allranks run --env local -n 3"
            " --elastic 2 --rehearse ..."
        )
    if place.role == "rank" and place.kind not in _LAUNCHED:
        raise ConfigError(
            f"--rehearse starts its own ranks, and this process is rank {place.rank} of {place.size} of {place.kind}.\n"
            "  Add --env local, or start it outside that job."
        )


def _launch(options: Options, place: LaunchContext) -> int | Rank:
    if place.role == "rank" and place.kind not in _LAUNCHED and not options.hosts and options.node is None:
        if options.nproc is None and options.per_host is None:
            return _run_in_place(options, place)
        raise ConfigError(
            f"this process is already rank {place.rank} of {place.size}, started by {place.kind}; -n would start ranks"
            " in each of them.\n  Remove -n to run the program as this rank, or use --env local."
        )
    if options.hosts or (place.role == "allocation" and options.node is None):
        command = command_for(place) if place.role == "allocation" else SSH
        if options.hosts and not command.takes_names:
            command = SSH
        hosts = options.hosts or read_hosts(place)
        if not hosts:
            raise ConfigError(f"the allocation of {place.kind} does not list its hosts.\n  Specify them with --hosts.")
        options.reporter.detail(f"hosts: {', '.join(map(str, hosts))}, by {command.name}")
        if not (len(hosts) == 1 and is_this_host(hosts[0].name)):
            _refuse_stdin(options)
            with interruptible():
                return run_on_hosts(options, hosts, command)
        return _run_here(options, hosts[0])
    nodes = options.nodes or ((place.nodes, place.nodes) if place.role == "node" and place.nodes else None)
    _check_number(options, nodes)
    if nodes is not None and nodes[1] > 1:
        _refuse_stdin(options)
        with interruptible():
            return _run_among(options, place, nodes)
    return _run_here(options, Slots("localhost"))


def _refuse_stdin(options: Options) -> None:
    """Refuse ``--stdin`` if another process starts the ranks, because they cannot have this process's stdin.

    Raises:
        ConfigError: a rank number was given; with a way to debug instead.
    """
    if isinstance(options.stdin, int):
        raise ConfigError(
            f"--stdin {options.stdin}: only ranks of a job on one host can have stdin.\n  Debug the job with fewer"
            " ranks there (ssh -t HOST allranks run -n 2 --stdin 0 ...), or use a debugger on a port (debugpy)."
        )


def _check_number(options: Options, nodes: tuple[int, int] | None) -> None:
    """Check that the number of hosts fits the number of this host.

    Raises:
        ConfigError: the number is missing or too small. Without it, each host would run a job of one host.
    """
    leader = options.leader[0] if options.leader is not None else ""
    if nodes is None and (options.node is not None or (leader and not is_this_host(leader))):
        reason = f"--node-rank {options.node}" if options.node is not None else f"host 0 is {leader}, another host"
        raise ConfigError(f"{reason}: the job has several hosts, but their number is missing.\n  Specify it with -N.")
    if nodes is not None and options.node is not None and options.node >= nodes[1]:
        expected = "0" if nodes[1] == 1 else f"0 to {nodes[1] - 1}"
        raise ConfigError(f"--node-rank {options.node} is out of range; expected {expected} (-N {nodes[1]})")


def _run_here(options: Options, host: Slots) -> int | Rank:
    if options.spares:
        raise ConfigError(
            f"--spares {options.spares} requires several hosts, but the job has only {host.name}.\n"
            "  Remove --spares, or add hosts."
        )
    if options.nodes is not None and options.nodes[0] > 1:
        raise ConfigError(
            f"-N requests {options.nodes[0]} hosts, but the job has only {host.name}.\n  Decrease -N, or add hosts."
        )
    gpus = len(visible_gpus(os.environ)) if options.per_host == "gpu" else 0
    (nproc,) = share_out([host], options.nproc, options.per_host, [(usable_cpus(), gpus)], strict=bool(options.hosts))
    if options.dry_run:
        put(describe_plan([host.name], [nproc], "from this process", options.target.words()) + "\n")
        for line in describe(cpu_places_of(nproc, options.bind, options.one_gpu_per_rank, os.environ)):
            put(f"    {line}\n")
        return 0
    return run_here(options, nproc)


def _run_among(options: Options, place: LaunchContext, nodes: tuple[int, int]) -> int | Rank:
    node = options.node if options.node is not None else place.node
    name, port = options.leader or (place.leader, None)
    if options.node is None and node is not None and not name:
        raise ConfigError(
            f"{place.kind} reports that this is host {node} of {nodes[1]}, but not the name of host 0.\n"
            "  Specify it with --master-addr."
        )
    if node is None and not name:
        raise ConfigError(
            f"-N requests {nodes[1]} hosts, but no scheduler lists them.\n  Specify the hosts with --hosts, or start"
            " the same command on each of them with --node-rank and --master-addr."
        )
    if options.per_host == "gpu" and not visible_gpus(os.environ):
        raise ConfigError(
            "this host has no GPU, but -n gpu requests one rank per GPU.\n"
            "  Specify the number of ranks with -n, or make its GPUs visible (nvidia-smi -L, CUDA_VISIBLE_DEVICES)."
        )
    secret = load_secret()
    ports = [port] if port is not None else [*place.ports[:PORTS_TRIED]] or [_PORT]
    if port is None and place.job and place.hosts:  # several jobs may share these hosts
        secret = job_secret(place, secret)
        ports = [*place.ports[:PORTS_TRIED], *job_ports(secret)]
    if options.dry_run:
        where = f"{name or 'this host'}, port {', '.join(map(str, ports))}"
        put(f"{options.target.words()}, on this host and {nodes[1] - 1} more; rendezvous on {where}\n")
        return 0
    if ports == [0]:
        raise ConfigError(
            "port 0: the other hosts cannot know the port that host 0 would choose.\n  Specify a free port of host 0."
        )
    options.reporter.detail(
        f"hosts: {nodes[1]}, rendezvous on {name or 'this host'}, port {', '.join(map(str, ports))}"
    )
    sure = node == 0 or (node is None and options.leads is True)
    if sure or (node is None and options.leads is None and is_this_host(name)):
        try:
            return lead(options, nodes, options.leader[0] if options.leader else "", ports, secret)
        except OSError as error:
            # If the port is in use, host 0's launcher may run here already, and this process joins it.
            if sure or error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"cannot listen on port {', '.join(map(str, ports))}: {str(error.strerror).lower()}.\n"
                    "  Select another port with --master-port, the same on all hosts."
                ) from None
    # The name of a pod resolves only with its domain, which is this pod's domain.
    names = dict.fromkeys([name or "127.0.0.1"] if options.leader else [name, with_domain(name, socket.getfqdn())])
    return join_leader(options, node, [(name, port) for name in names for port in ports], secret)


def _run_in_place(options: Options, place: LaunchContext) -> int:
    """Replace this process by the program, as the rank that this process already is."""
    environ = _environ_in_place(options, place.kind)
    target = options.target.on(place.local_rank or 0, place.rank or 0)
    words = [target.name, *target.args]
    if target.is_python:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        words = [sys.executable, *flags, *(["-m"] if target.kind == "module" else []), *words]
    if not options.dry_run:
        options.reporter.detail(f"running {target.words()} in place, as rank {place.rank} of {place.size}")
        os.execvpe(words[0], words, {**os.environ, **environ})
    put(f"{target.words()}, in place of this process, which is rank {place.rank} of {place.size} of {place.kind}\n")
    return 0


def _environ_in_place(options: Options, kind: str) -> dict[str, str]:
    """Return the variables for those options that variables can express.

    Args:
        options: the requested options.
        kind: the launcher that started this process.

    Raises:
        ConfigError: an option requires a launcher.
    """
    for place in (options, options.display):
        declared = declarations(type(place))
        for field in fields(place):
            kept = declared[field.name].in_place if field.name in declared else field.name in _IN_PLACE
            if not kept and getattr(place, field.name) != field.default:
                option = _SPELLINGS.get(field.name) or option_name(type(place), field.name)
                raise ConfigError(
                    f"{option} applies only to ranks that allranks run starts, but {kind} has started this rank.\n"
                    f"  Remove {option}."
                )
    environ = options.environ
    if options.threads is not None:
        environ["OMP_NUM_THREADS"] = str(options.threads)
    return environ
