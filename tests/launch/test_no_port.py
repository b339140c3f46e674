"""Absence of TCP listeners in all processes of a job on one host."""

import subprocess
import sys
from pathlib import Path

# The second group has a URL with the port that is reserved for programs that use torch.distributed.
SCRIPT = """
import os, re
from pathlib import Path
import torch
import allranks as dist

dist.init_process_group()
dist.destroy_process_group()
dist.init_process_group(init_method="tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ))
dist.all_reduce(torch.ones(1))
dist.barrier()
listening = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in Path(table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening.add(fields[9])
for pid in (os.getpid(), os.getppid()):
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        inodes.update(re.findall(r"socket:\\[(\\d+)\\]", target))
    assert inodes, "no socket seen: the test is blind"
    assert not inodes & listening, f"process {pid} listens on a TCP port"
print("no port")
dist.barrier()
"""


def test_job_on_one_host_listens_on_no_tcp_port(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "run", "-n", "2", str(script)], capture_output=True, text=True, check=False
    )
    assert sorted(done.stdout.splitlines()) == ["[0] no port", "[1] no port"], done.stderr
    assert done.returncode == 0
