"""How an agent is started on another host: the words of a command. Pure.

Two kinds. Through ssh and what is like it, one process for each host, whose stdin and stdout are the line to the
agent: no port, no secret, and the end of either side is seen by the other. Through srun, flux and pbsdsh, which have
no stdin for each host, agents that dial the launcher.

Source: ssh(1), srun(1), flux-run(1), and the manuals of OpenPBS (pbsdsh), LSF (blaunch) and SGE (qrsh). Of these,
ssh and srun are tried for real.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

__all__ = [
    "LIKE_SSH",
    "NOISE",
    "agent_words",
    "carried",
    "explain",
    "flux_words",
    "given",
    "like_ssh",
    "pbsdsh_words",
    "srun_environ",
    "srun_words",
]

LIKE_SSH = ("ssh", "blaunch", "qrsh")

_SSH_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    "LogLevel": "ERROR",
}
NOISE = (b"cluster configuration lacks support for cpu binding",)
"""What is said on stderr and need not be: that CPUs are not bound, where it was asked that they should not be."""

# What programs of other hosts need to behave as they would here, and what engines are tuned by.
_CARRIED = ("ALLRANKS_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "UCX_", "PYTHON", "CUDA_LAUNCH_BLOCKING")
_NOT_CARRIED = ("ALLRANKS_SECRET", "ALLRANKS_STORE", "PYTHONHOME")

# What each of a job's tasks gets. Programs count their workers by it.
_PER_TASK = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")


def agent_words(python: str, flags: Sequence[str] = (), dial: str = "", count_gpus: bool = False) -> list[str]:
    """The command that becomes an agent.

    Args:
        python: the interpreter, by the path that it has on all hosts.
        flags: its options.
        dial: where the launcher listens, ``host,host:port``; "" for an agent that speaks on stdin and stdout.
        count_gpus: it says how many GPUs there are.
    """
    words = [*(["--dial", dial] if dial else []), *(["--count-gpus"] if count_gpus else [])]
    return [python, *flags, "-m", "allranks.launch.hosts.serve", *words]


def like_ssh(way: str, host: str, agent: Sequence[str], environ: Mapping[str, str], ssh: str = "") -> list[str]:
    """The command that starts an agent on a host.

    Args:
        way: one of ``LIKE_SSH``.
        host: the host.
        agent: the agent's command.
        environ: variables that its interpreter needs to start.
        ssh: what to call in place of ``ssh``, with options.
    """
    if environ:
        agent = ["env", *(f"{name}={value}" for name, value in sorted(environ.items())), *agent]
    if way == "blaunch":
        return ["blaunch", "-z", host, *agent]
    if way == "qrsh":
        return ["qrsh", "-inherit", "-V", host, *agent]
    words = shlex.split(ssh) or ["ssh"]
    options: list[str] = []
    if os.path.basename(words[0]) == "ssh":
        options = [word for name, value in _SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
        options.append("-T")
    return [*words, *options, host, "exec " + shlex.join(agent)]


def srun_words(hosts: Sequence[str], agent: Sequence[str]) -> list[str]:
    """The command that starts an agent on each of an allocation's hosts.

    All CPUs and all memory of the allocation are the agent's to share out; a step that runs already, as that of an
    interactive shell, does not count.
    """
    count = str(len(hosts))
    options = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(hosts)]
    return ["srun", *options, "--overlap", "--cpu-bind=none", "--mem=0", "--input=none", "--quiet", *agent]


def srun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment for srun, which takes variables for options of its own.

    To srun the agent is one task: it would get the CPUs of one rank.
    """
    return {n: v for n, v in environ.items() if not n.startswith("SRUN_") and n not in _PER_TASK}


def flux_words(hosts: Sequence[str], agent: Sequence[str]) -> list[str]:
    """As ``srun_words``, in a Flux instance."""
    count = str(len(hosts))
    return ["flux", "run", "--nodes", count, "--ntasks", count, "--requires", f"host:{','.join(hosts)}", *agent]


def pbsdsh_words(line: int, agent: Sequence[str]) -> list[str]:
    """The command that starts an agent on one of PBS' hosts. Neither stdin nor variables get there.

    Args:
        line: the host's first line in PBS_NODEFILE, counted from 0.
        agent: the agent's command.
    """
    return ["pbsdsh", "-n", str(line), "--", *agent]


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


def given(wanted: Sequence[str]) -> dict[str, str]:
    """The variables whose value ``-x`` says itself: NAME=VALUE. Others are in the launcher's environment already."""
    pairs = (word.partition("=") for word in wanted)
    return {name: value for name, said, value in pairs if said}


def explain(way: str, host: str, python: str, code: int | None, said: str) -> str:
    """Why no agent came up on a host.

    Args:
        way: how it was started.
        host: where.
        python: the interpreter.
        code: the exit code of the command; None if it still runs.
        said: what it wrote on stderr.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if "No module named allranks" in said or "No module named 'allranks" in said:
        return f"{host}: allranks is not installed in {python} there: {last}"
    if code in (126, 127) or "No such file or directory" in last or "not found" in last:
        return f"{host}: there is no interpreter {python}: {last or f'exit code {code}'}"
    if way == "ssh" and code == 255:
        hint = ""
        if "Permission denied" in said:
            hint = f" (ssh must get in without a password: ssh-copy-id {host}, or --ssh 'ssh -i KEY')"
        elif "Host key verification failed" in said:
            hint = f" (connect once by hand: ssh {host})"
        return f"{host}: ssh cannot connect: {last or 'no reason given'}{hint}"
    state = "did not answer in time" if code is None else f"{way} ended with exit code {code}"
    return f"{host}: {state}{': ' + last if last else ''}"
