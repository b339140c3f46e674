"""A real sshd on each host, and a client that logs in on every host without a prompt.

``Ssh.environ`` has an ``ssh`` on its PATH that reads this client's configuration, so that programs that call ssh
(launchers, mpiexec) need no option.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.cluster import Cluster, await_true

SSHD = "/usr/sbin/sshd"
PORT = 2222

_SERVER = """
Port {port}
HostKey {folder}/host_key
PidFile {folder}/{name}.pid
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100:30:200
"""
_CLIENT = """
Host *
  User root
  Port {port}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
  LogLevel ERROR
"""


def trouble() -> str:
    """Return the reason why sshd cannot run here, or ""."""
    missing = [tool for tool in (SSHD, "ssh", "ssh-keygen", "setpriv") if shutil.which(tool) is None]
    return f"without {', '.join(missing)} (openssh-server, openssh-client)" if missing else ""


@dataclass(frozen=True)
class Ssh:
    """The running servers and their client.

    Attributes:
        hosts: the hosts, each of which runs a server.
        config: the client's configuration, for ``ssh -F``.
        environ: an environment in which plain ``ssh`` uses this configuration.
        folder: temporary folder that exists as long as the servers run.
    """

    hosts: Cluster
    config: Path
    environ: dict[str, str]
    folder: Path


@contextlib.contextmanager
def sshd(hosts: Cluster) -> Iterator[Ssh]:
    """Run the servers."""
    with tempfile.TemporaryDirectory(prefix="allranks-sshd-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        # sshd requires this folder, which the boot process usually creates. Other programs may use it, so it stays.
        Path("/run/sshd").mkdir(0o755, exist_ok=True)
        for key in ("id", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        config = folder / "config"
        config.write_text(_CLIENT.format(port=PORT, folder=folder))
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        ssh.chmod(0o755)
        log = folder / "log"
        for host in hosts.hosts:
            server = folder / f"{host.name}.conf"
            server.write_text(_SERVER.format(port=PORT, folder=folder, name=host.name))
            stack.enter_context(host.serve(log, SSHD, "-D", "-e", "-f", str(server)))
        for host in hosts.hosts:
            await_true((folder / f"{host.name}.pid").exists, f"up: sshd on {host.name}", log)
        environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        yield Ssh(hosts, config, environ, folder)
