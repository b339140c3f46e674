"""The command of an agent on another host: its words, the variables that its ranks get, why it did not come up. Pure.

A scheduler's ``RemoteCommand`` starts that command. There are two kinds. ssh and its like start one process for each
host, whose stdin and stdout connect the launcher with the agent: no port and no secret is needed, and each side sees
the other's end. srun, flux and pbsdsh have no stdin for each host: their agents connect to the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from allranks._cluster.schedulers import SCHEDULERS
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks.launch.spec.options import given

__all__ = ["CONNECTED", "HERE", "agent_words", "carried", "explain"]

HERE = RemoteCommand("agent")
"""The agent's command itself, on this host."""
CONNECTED = RemoteCommand("dial")
"""Nothing of ours: the agent of another launcher, or one that a user started, has connected to us."""

# What programs of other hosts need to behave as they would here, and what engines are tuned by.
_CARRIED = ("ALLRANKS_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "UCX_", "PYTHON", "CUDA_LAUNCH_BLOCKING")
_NOT_CARRIED = ("ALLRANKS_SECRET", "ALLRANKS_STORE", "PYTHONHOME")

_PER_TASK = tuple(name for scheduler in SCHEDULERS for name in scheduler.carries)


def agent_words(python: str, flags: Sequence[str] = (), dial: str = "", count_gpus: bool = False) -> list[str]:
    """The command that becomes an agent.

    Args:
        python: the interpreter, by the path that it has on all hosts.
        flags: its options.
        dial: where the launcher listens, ``host,host:port``; "" for an agent that uses stdin and stdout.
        count_gpus: it reports how many GPUs there are.
    """
    words = [*(["--dial", dial] if dial else []), *(["--count-gpus"] if count_gpus else [])]
    return [python, *flags, "-m", "allranks.launch.agents.serve", *words]


def carried(environ: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """The variables that ranks of other hosts get.

    Args:
        environ: the launcher's own.
        wanted: ``-x``: NAME, NAME=VALUE, or a pattern such as ``WANDB_*``.
    """
    found = {n: v for n, v in environ.items() if n.startswith((*_CARRIED, *_PER_TASK)) and n not in _NOT_CARRIED}
    for word in wanted:
        if "=" not in word:
            pattern = re.compile(".*".join(map(re.escape, word.split("*"))) + r"\Z")
            found |= {n: v for n, v in environ.items() if pattern.match(n)}
    return found | given(wanted)


def explain(command: RemoteCommand, host: str, python: str, code: int | None, stderr: str) -> str:
    """Why no agent came up on a host.

    Args:
        command: how it was started.
        host: where.
        python: the interpreter.
        code: the exit code of the command; None if it still runs.
        stderr: what it wrote on stderr.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if "No module named allranks" in stderr or "No module named 'allranks" in stderr:
        return f"{host}: allranks is not installed in {python} there: {last}"
    if code in (126, 127) or "No such file or directory" in last or "not found" in last:
        return f"{host}: there is no interpreter {python}: {last or f'exit code {code}'}"
    if why := command.explain(host, code, stderr):
        return f"{host}: {why}"
    state = "did not answer in time" if code is None else f"{command.name} ended with exit code {code}"
    return f"{host}: {state}{': ' + last if last else ''}"
