"""``allranks.run`` on several hosts through ssh."""

import json
import sys
from pathlib import Path

from support.sshd import Ssh

SCRIPT = """
import json, os, socket, sys
import allranks

def work(fail):
    rank = int(os.environ["RANK"])
    if fail and rank == 2:
        raise ValueError("boom")
    if not fail:
        return rank, socket.gethostname()
    os.read(os.pipe()[0], 1)

hosts = ["node1:2", "node2:1"]
told = allranks.run(work, (False,), hosts=hosts)
try:
    allranks.run(work, (True,), hosts=hosts)
except ValueError as error:
    told.append(str(error.__cause__).splitlines()[0])
try:
    allranks.run(work, (True,), n=2, hosts="node1,node7")
except allranks.ConfigError as error:
    told.append(str(error))
print(json.dumps(told))
"""


def test_run_starts_ranks_on_hosts_and_reports_unreachable_ones(ssh: Ssh, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "torch.py").touch()  # an empty module is sufficient here
    environ = ssh.environ | {"PYTHONPATH": str(tmp_path)}
    done = ssh.hosts.hosts[0].start([sys.executable, str(script)], environ)
    out, _ = done.communicate(timeout=60)
    told = json.loads(out.splitlines()[-1])  # the shells of the hosts can print lines before it
    assert told[:3] == [[0, "node1"], [1, "node1"], [2, "node2"]]
    assert told[3].startswith("rank 2 (host node2, pid ")
    assert told[4].startswith("node7: ssh cannot connect: ")
