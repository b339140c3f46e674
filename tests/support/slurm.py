"""A real SLURM: slurmctld on the first host, slurmd on each host, and a separate munged. All state is in one folder.

``Slurm.environ`` directs the clients (srun, sbatch, ...) there through SLURM_CONF. Start the clients on a host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.cluster import Cluster, Host, await_true

CPUS = 4
_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "setpriv")
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MpiParams=ports=20000-20999
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SwitchType=switch/none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=5 DefaultTime=5 State=UP OverSubscribe=NO
"""


def trouble() -> str:
    """Return the reason why SLURM cannot run here, or ""."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"without {', '.join(missing)} (slurm-wlm, slurmctld, slurmd, slurm-client, munge)" if missing else ""


@dataclass(frozen=True)
class Slurm:
    """A running SLURM.

    Attributes:
        hosts: the hosts, which are all nodes of the cluster.
        environ: the environment for its clients.
        folder: its state and its logs.
        daemons: the running daemons; closed at the end.
    """

    hosts: Cluster
    environ: dict[str, str]
    folder: Path
    daemons: contextlib.ExitStack

    def run(self, *command: str, timeout_s: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a client (or another command) on the first host until it exits.

        Raises:
            AssertionError: the command did not finish in time. Its jobs are canceled.
        """
        inside = self.hosts.hosts[0].inside(*command)
        env = {**self.environ, **environ}
        try:
            return subprocess.run(
                inside, env=env, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            self.cancel()
            raise AssertionError(
                f"the command did not exit within {timeout_s} s: {command}\n{error.stdout!r}\n{error.stderr!r}"
            ) from None

    def cancel(self) -> None:
        """Cancel all jobs, and wait until their processes have exited."""
        scancel = self.hosts.hosts[0].inside("scancel", "--signal=KILL", "--full", "--user=root")
        subprocess.run(scancel, env=self.environ, check=True)
        await_true(self._is_idle, "idle", self.folder / "log")

    @contextlib.contextmanager
    def lost(self, number: int) -> Iterator[None]:
        """Kill the daemon and all job processes of a node inside the block, as a power failure does.

        After the block the daemon is restarted. The node is marked as down explicitly, because SLURM detects the
        failure only after some minutes.
        """
        host = self.hosts.hosts[number]
        network = os.readlink(f"/proc/{host.holder}/ns/net")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # The process has exited, or this user may not inspect it.
                if int(entry.name) != host.holder and os.readlink(entry / "ns" / "net") == network:
                    os.kill(int(entry.name), signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName={host.name}", "State=DOWN", "Reason=lost").check_returncode()
        try:
            yield
        finally:
            self._serve(host)
            await_true(self._is_idle, "idle", self.folder / "log")

    def _serve(self, host: Host) -> None:
        words = ("slurmd", "-D", "-N", host.name)
        self.daemons.enter_context(host.serve(self.folder / "log", *words, environ=self.environ))

    def _is_idle(self) -> bool:
        inside = self.hosts.hosts[0].inside("sinfo", "--noheader", "--Node", "--format=%t")
        done = subprocess.run(inside, env=self.environ, capture_output=True, text=True)
        return done.stdout.split() == ["idle"] * len(self.hosts.hosts)


@contextlib.contextmanager
def slurm(hosts: Cluster) -> Iterator[Slurm]:
    """Run the daemons."""
    with tempfile.TemporaryDirectory(prefix="allranks-slurm-") as name, contextlib.ExitStack() as stack:
        folder, head = Path(name), hosts.hosts[0]
        log = folder / "log"
        folder.chmod(0o755)  # munged requires a socket in a folder that all users can enter
        for host in hosts.hosts:
            (folder / f"spool-{host.name}").mkdir()
        (folder / "state").mkdir()
        nodes = "\n".join(map(_node, hosts.hosts))
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, head=head, nodes=nodes))
        # Without these removals, a job's processes would use the machine's own configuration.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        environ["SLURM_CONF"] = str(folder / "slurm.conf")
        _munged(stack, folder, head)
        stack.enter_context(head.serve(log, "slurmctld", "-D", "-c", environ=environ))
        made = Slurm(hosts, environ, folder, stack)
        for host in hosts.hosts:
            made._serve(host)
        await_true(made._is_idle, "up: SLURM", log)
        stack.callback(made.cancel)
        yield made


def _node(host: Host) -> str:
    return f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} RealMemory=2000 State=UNKNOWN"


def _munged(stack: contextlib.ExitStack, folder: Path, head: Host) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    socket = folder / "munge.socket"
    options = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
    log = folder / "log"
    stack.enter_context(head.serve(log, "munged", "--foreground", "--force", f"--socket={socket}", *options))
    await_true(socket.exists, "up: munged", log)
