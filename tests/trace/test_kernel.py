"""What /proc reports about other processes of this host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from allranks._trace.kernel import memory_files

pytestmark = pytest.mark.quick

CREATE = "import os, sys; fd = os.memfd_create('allranks-test-7', 0); print(fd, flush=True); sys.stdin.read()"


def test_memory_file_belongs_to_the_process_that_created_it() -> None:
    with subprocess.Popen([sys.executable, "-c", CREATE], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        fd = int(process.stdout.readline())
        assert memory_files(process.pid, "allranks-test-") == [f"/proc/{process.pid}/fd/{fd}"]
        assert memory_files(process.pid, "allranks-other-") == []
        # This process has the same file open, as a watcher has that reads the record of another rank.
        with open(f"/proc/{process.pid}/fd/{fd}", "rb"):
            assert memory_files(os.getpid(), "allranks-test-") == []
        process.kill()
