"""ssh, which starts agents on any host that a user names. It detects nothing.

Source: ssh(1). Tested with real ssh.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from allranks._cluster.schedulers.interface import RemoteCommand

__all__ = ["SSH"]

_OPTIONS = {
    "BatchMode": "yes",  # fail instead of asking for a password, because no user is at a terminal
    "ConnectTimeout": "10",
    # Seconds. With four unanswered probes, ssh detects a vanished host after about 20 s.
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    "LogLevel": "ERROR",
}


def _words(host: str, agent: Sequence[str], program: str) -> list[str]:
    words = shlex.split(program) or ["ssh"]
    options: list[str] = []
    if os.path.basename(words[0]) == "ssh":
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        # No terminal, which would change bytes of the agent's protocol on stdin and stdout.
        options.append("-T")
    # With exec, no remote shell remains between ssh and the agent.
    return [*words, *options, host, "exec " + shlex.join(agent)]


def _explain(host: str, code: int | None, stderr: str) -> str:
    # ssh uses 255 for its own failures. Other codes are those of the agent.
    if code != 255:
        return ""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    hint = ""
    if "Permission denied" in stderr:
        hint = f" (ssh must connect without a password: ssh-copy-id {host}, or --ssh 'ssh -i KEY')"
    elif "Host key verification failed" in stderr:
        hint = f" (connect once manually: ssh {host})"
    elif "Could not resolve hostname" in stderr:
        hint = f" (check the name: getent hosts {host})"
    return f"ssh cannot connect: {lines[-1] if lines else 'no reason reported'}{hint}"


SSH = RemoteCommand(
    "ssh",
    per_host=_words,
    explain=_explain,
    # If an option is given twice, ssh uses the first. A vanished host is detected after 16 s. A network cut of 7 s is
    # survived: after it, TCP may send nothing for up to another 7 s.
    outlives=("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=7"),
)
