"""A scheduler of another package: the example of docs/extending.md, installed, is detected and starts and accepts jobs.

YARD's commands are stand-ins that start real processes on the test hosts by ssh.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_schedulers import SAY, WANTED, stand_in

from support.jobs import Jobs, jobs
from support.sshd import Ssh

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(__file__).parents[2] / "src"
YARDRUN = """
    over_ssh(sys.argv[1], sys.argv[2:], dict(os.environ), "-n")
"""


def example() -> str:
    (text,) = re.findall(r"<!-- yard.py -->\n```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    return str(text)


def install(folder: Path, text: str) -> Path:
    """Install a package as pip does. Return the folder for PYTHONPATH."""
    site = folder / "site"
    about = site / "yard_for_allranks-1.5.dist-info"
    about.mkdir(parents=True)
    (site / "yard.py").write_text(text)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: yard-for-allranks\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[allranks.schedulers]\nyard = yard:SCHEDULER\n")
    return site


def run(site: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SOURCE), str(site)])
    return subprocess.run(
        [sys.executable, "-m", "allranks", *words],
        env={**os.environ, "PYTHONPATH": path, **environ},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def test_scheduler_of_a_package_is_detected(tmp_path: Path) -> None:
    site = install(tmp_path, example())
    done = run(site, "env", "--json", "--env", "yard", YARD_RANK="1", YARD_SIZE="2")
    program = json.loads(done.stdout)["program"]
    assert (program["kind"], program["role"], program["rank"], program["size"]) == ("yard", "rank", 1, 2)
    done = run(site, "env", ALLRANKS_ENV="yard", YARD_HOSTS="node0:2,node1:2")
    assert "YARD_HOSTS" in done.stdout
    assert "starts the ranks on 2 nodes of this allocation" in done.stdout
    done = run(site, "run", "--env", "yard", "yard.py")
    assert done.returncode == 2
    assert "this process has no variable of that scheduler: expected YARD_HOSTS or YARD_RANK" in done.stderr


def test_job_is_started_through_the_scheduler_of_a_package(job: Jobs) -> None:
    site = install(job.folder, example())
    paths = os.pathsep.join([str(job.folder / "fake"), str(SOURCE), str(site)])
    environ = {"YARD_HOSTS": "node0:2,node1:2", "PYTHONPATH": paths, "PATH": stand_in(job, "yardrun", YARDRUN)}
    done = job.run(0, "--env", "yard", job.write(SAY), **environ)
    assert done.code == 0, done.err
    assert [line.partition("] ")[2] for line in done.lines] == WANTED


def test_job_is_submitted_to_the_scheduler_of_a_package(tmp_path: Path) -> None:
    site = install(tmp_path, example())
    (tmp_path / "yardsub").write_text(f"#!/bin/sh\ncat >{tmp_path}/job\necho yard job 12\n")
    (tmp_path / "yardsub").chmod(0o755)
    words = ("submit", "--to", "yard", "-N", "2", "-n", "4", "--name", "first", "--now", "yard.py")
    done = run(site, *words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr
    assert "submitted to YARD: yard.py, 4 ranks on 2 hosts" in done.stderr
    assert "yardstat 12" in done.stderr
    text = (tmp_path / "job").read_text()
    assert text.startswith("#!/bin/bash\n#YARD name first\n#YARD hosts 2\n#YARD tasks 2\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "interface=1",
            "interface=0",
            "requires version 0 of .* supports version 1.*Install a newer yard-for-allranks, or an older allranks",
        ),
        (
            "interface=1",
            "interface=7",
            "requires version 7 of .* supports version 1.*Install a newer allranks, or an older yard-for-allranks",
        ),
        ("kinds=", "sorts=", r"cannot be loaded \(yard:SCHEDULER\): TypeError: .*'sorts'"),
        (
            "from allranks",
            "import a_module_that_is_not_there\nfrom allranks",
            r"cannot be loaded \(yard:SCHEDULER\): ModuleNotFoundError",
        ),
        ('name="yard"', 'name="shed"', "whose name is 'shed'. Expected 'yard'"),
    ],
)
def test_incompatible_scheduler_is_refused_with_the_name_of_its_package(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    site = install(tmp_path, example().replace(before, after, 1))
    for words in (("env", "--env", "yard"), ("run", "--env", "yard", "yard.py"), ("submit", "--to", "yard", "yard.py")):
        done = run(site, *words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert re.search("scheduler 'yard': yard-for-allranks 1.5 .*" + said, done.stderr, re.DOTALL), done.stderr


def test_scheduler_of_a_package_is_loaded_only_if_it_is_named(tmp_path: Path) -> None:
    site = install(tmp_path, "raise SystemExit('loaded unasked')")
    done = run(site, "env", YARD_RANK="1", YARD_SIZE="2")
    assert done.returncode == 0, done.stderr
