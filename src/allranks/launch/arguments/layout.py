"""The number of ranks of each host. Pure.

Ranks are assigned in blocks, as by mpirun and srun: the first host's ranks come first. The slots that a user gives a
host are a limit. The slots of a scheduler are only a default: jobs of torch request one task for each node and then
start a rank for each GPU. The resources of a host (CPUs, GPUs) count only if the user requested that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from allranks._base.errors import ConfigError
from allranks._cluster.hostlist import Slots

__all__ = ["check_elastic", "describe_plan", "share_out"]


def check_elastic(elastic: tuple[int, int | None] | None, nproc: int) -> None:
    """Check that the number of ranks fits the range of an elastic job.

    Args:
        elastic: the least and the greatest number of ranks; None for a job that is not elastic.
        nproc: the number of ranks that are started.

    Raises:
        ConfigError: it does not fit; with the action to take.
    """
    if elastic is None:
        return
    least, most = elastic
    if nproc < least:
        raise ConfigError(
            f"--elastic {least} requires at least {least} ranks, but the job has {nproc}.\n  Increase -n."
        )
    if most is not None and most < nproc:
        raise ConfigError(
            f"--elastic {least}:{most} allows at most {most} ranks, but the job has {nproc}.\n  Decrease -n."
        )


def share_out(
    hosts: Sequence[Slots],
    nproc: int | None,
    per_host: int | Literal["auto", "gpu"] | None,
    has: Sequence[tuple[int, int]] = (),
    *,
    strict: bool = True,
) -> list[int]:
    """Compute the number of ranks of each host.

    Args:
        hosts: the hosts, in the order of their ranks.
        nproc: number of ranks in the job; None if it follows.
        per_host: ranks on each host, or the resource that is counted; None if it follows.
        has: CPUs and GPUs of each host; required if ``per_host`` is a word.
        strict: slots are limits.

    Returns:
        The number of ranks by host; a host at the end may have none.

    Raises:
        ConfigError: the ranks do not fit.
    """
    slots = [host.count for host in hosts]
    # A scheduler's slots are a default and not a limit (decision 058).
    if not strict and (per_host is not None or (nproc or 0) > sum(1 if slot is None else slot for slot in slots)):
        slots = [None] * len(hosts)
    if isinstance(per_host, str):
        found = [max(1, cpus) if per_host == "auto" else gpus for cpus, gpus in has]
        for host, count in zip(hosts, found, strict=True):
            if count == 0:
                raise ConfigError(
                    f"{host.name} has no GPU, but -n gpu requests one rank per GPU.\n"
                    "  Specify the number of ranks with -n, or make its GPUs visible (nvidia-smi -L,"
                    " CUDA_VISIBLE_DEVICES)."
                )
    elif per_host is not None:
        found = [per_host] * len(hosts)
        for host, slot in zip(hosts, slots, strict=True):
            if slot is not None and slot < per_host:
                raise ConfigError(
                    f"{per_host} ranks on each host do not fit: {host.name} has {_slots(slot)}.\n"
                    f"  To allow more, specify {host.name}:{per_host}."
                )
    elif nproc is None:
        if not any(found := [1 if count is None else count for count in slots]):
            raise ConfigError(f"no host has a slot: {', '.join(map(str, hosts))}.\n  Specify slots: {hosts[0].name}:1.")
        return found
    elif all(count is None for count in slots):
        least, more = divmod(nproc, len(hosts))
        return [least + (number < more) for number in range(len(hosts))]
    else:
        return _fill(hosts, slots, nproc)
    if nproc is not None and nproc != sum(found):
        raise ConfigError(
            f"-n requests {nproc} ranks, but {_words(per_host)} on {len(hosts)} host(s) requests {sum(found)}.\n"
            "  Remove one of the two options."
        )
    return found


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _words(per_host: int | str) -> str:
    return f"--nproc-per-node {per_host}"


def _fill(hosts: Sequence[Slots], slots: Sequence[int | None], nproc: int) -> list[int]:
    """Fill the slots of one host after the other."""
    found, left = [], nproc
    for slot in slots:
        fitting = min(left, 1 if slot is None else slot)
        found.append(fitting)
        left -= fitting
    if left:
        listed = ", ".join(f"{h.name} has {_slots(1 if h.count is None else h.count)}" for h in hosts)
        raise ConfigError(f"{nproc} ranks do not fit: {listed}.\n  To allow more, specify {hosts[0].name}:{nproc}.")
    return found


def describe_plan(hosts: Sequence[str], counts: Sequence[int | str], how: str, what: str) -> str:
    """Return a description of the plan: one line for each host.

    Args:
        hosts: the hosts.
        counts: number of ranks of each host; a word if the host determines the number.
        how: the way in which the agents are started.
        what: the program.
    """
    width = max(len(name) for name in hosts)
    lines = [f"{what}, on {len(hosts)} host{'s' * (len(hosts) != 1)}, started {how}:"]
    first = 0
    for name, count in zip(hosts, counts, strict=True):
        if isinstance(count, str):
            lines.append(f"  {name:{width}}  {count}")
            continue
        ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
        lines.append(f"  {name:{width}}  {ranks if count else 'none'}")
        first += count
    return "\n".join(lines)
