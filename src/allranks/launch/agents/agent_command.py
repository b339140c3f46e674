"""The command of an agent on another host: its words, the variables of its ranks, and why it did not start. Pure.

A scheduler's ``RemoteCommand`` starts that command. There are two kinds. ssh and similar commands start one process for
each host, whose stdin and stdout connect the launcher with the agent. No port and no secret is needed, and each side
detects the exit of the other. srun, flux and pbsdsh have no stdin for each host, so their agents connect to the
launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from allranks import __version__
from allranks._cluster.schedulers import SCHEDULERS
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks.launch.spec.options import given

__all__ = ["CONNECTED", "HERE", "agent_words", "exported_environ", "explain", "last_message"]

HERE = RemoteCommand("agent")
"""The agent's command itself, on this host."""
CONNECTED = RemoteCommand("dial")
"""No command of this launcher: the agent of another launcher, or one that a user started, has connected."""

# Variables that make programs on other hosts behave as on this host, and variables that tune engines.
_EXPORTED = ("ALLRANKS_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "UCX_", "PYTHON", "CUDA_LAUNCH_BLOCKING")
_NOT_EXPORTED = ("ALLRANKS_SECRET", "ALLRANKS_STORE", "PYTHONHOME")

_PER_TASK = tuple(name for scheduler in SCHEDULERS for name in scheduler.carries)


def agent_words(python: str, flags: Sequence[str] = (), dial: str = "", count_gpus: bool = False) -> list[str]:
    """Return the command that starts an agent.

    Args:
        python: the path of the interpreter, which is the same on all hosts.
        flags: options of the interpreter.
        dial: addresses on which the launcher listens, ``host,host:port``; "" for an agent that uses stdin and stdout.
        count_gpus: the agent reports the number of GPUs.
    """
    words = [*(["--dial", dial] if dial else []), *(["--count-gpus"] if count_gpus else [])]
    return [python, *flags, "-m", "allranks.launch.agents.serve", *words]


def exported_environ(environ: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Return the variables for ranks of other hosts.

    Args:
        environ: the launcher's environment.
        wanted: ``-x``: NAME, NAME=VALUE, or a pattern such as ``WANDB_*``.
    """
    found = {n: v for n, v in environ.items() if n.startswith((*_EXPORTED, *_PER_TASK)) and n not in _NOT_EXPORTED}
    for word in wanted:
        if "=" not in word:
            pattern = re.compile(".*".join(map(re.escape, word.split("*"))) + r"\Z")
            found |= {n: v for n, v in environ.items() if pattern.match(n)}
    return found | given(wanted)


def explain(command: RemoteCommand, host: str, python: str, code: int | None, stderr: str) -> str:
    """Return why no agent started on a host.

    Args:
        command: the command that started it.
        host: the host.
        python: the interpreter.
        code: the exit code of the command; None if it still runs, although the connection has ended.
        stderr: the output of the command on stderr.
    """
    last = last_message(stderr)
    if "No module named allranks" in stderr or "No module named 'allranks" in stderr:
        return f"{host}: allranks is not installed in {python}: {last}\n  Install allranks {__version__} there."
    if code in (126, 127) or "No such file or directory" in last or "not found" in last:
        return (
            f"{host}: cannot run the interpreter {python}: {last or f'exit code {code}'}\n"
            "  Install it at the same path on all hosts, for example in a shared folder."
        )
    if why := command.explain(host, code, stderr):
        return f"{host}: {why}"
    state = "its agent has closed the connection" if code is None else f"{command.name} exited with code {code}"
    return f"{host}: {state}{': ' + last if last else ''}"


def last_message(text: str) -> str:
    """Return the last line that is not indented, and the indented lines below it: an error with its advice."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    begin = next((n for n in reversed(range(len(lines))) if not lines[n][0].isspace()), 0)
    return "\n".join(lines[begin:]).strip()
