"""Real MPI jobs for tests: mpirun of Open MPI and of MPICH, each in a separate environment (`make mpi`).

If an environment is missing, the tests that need it are skipped. With ALLRANKS_TEST_ALL=1, as in CI, they fail.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from allranks._base import pickling

ROOT = Path(__file__).parents[2]
PYTHONS = {
    name: ROOT / "build" / folder / "bin/python"
    for name, folder in (("openmpi", "bench-venv"), ("mpich", "mpich-venv"))
}
_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OVERSUBSCRIBE = {"openmpi": ["--oversubscribe"], "mpich": []}


def python_with(mpi: str) -> str:
    """Return the interpreter of the environment with this MPI."""
    if not PYTHONS[mpi].exists():
        missing = f"there is no {PYTHONS[mpi].relative_to(ROOT)} with mpi4py and {mpi}: make mpi"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    return str(PYTHONS[mpi])


def mpirun(
    mpi: str, ranks: int, *argv: str, python: str | None = None, timeout_s: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python argv`` on ``ranks`` ranks with the mpirun of ``mpi``, and with its Python or another one.

    Raises:
        AssertionError: the job did not finish in time; all its processes have been killed.
    """
    own = python_with(mpi)
    command = [str(Path(own).parent / "mpirun"), *_OVERSUBSCRIBE[mpi], "-n", str(ranks), python or own, *argv]
    # With PYTHONUNBUFFERED the lines of several ranks are interleaved.
    unset = ("RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    before = _segments()
    process = subprocess.Popen(
        command,
        env={**variables, **_ENVIRONMENT, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # mpirun terminates its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"the job did not exit within {timeout_s} s: {command}\n{out}\n{err}") from None
    finally:
        _sweep(_segments() - before)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _segments() -> set[Path]:
    """Return MPI's files in /dev/shm, which MPI does not delete if a job is killed."""
    return {path for kind in ("mpich_shm_*", "sm_segment.*") for path in Path("/dev/shm").glob(kind)}


def _sweep(segments: set[Path]) -> None:
    """Delete the files that no process has mapped. A concurrent job may have created some of them."""
    mapped = ""
    if segments:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):  # the process has exited
                mapped += maps.read_text()
    for path in segments:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def run_by_mpi(
    mpi: str, ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, **environ: str
) -> list[Any]:
    """Equivalent of ``allranks.testing.run_ranks`` for ranks that mpirun starts, in a world on the mpi engine.

    Raises:
        AssertionError: a rank failed or the job did not finish in time; contains all output.
    """
    with tempfile.TemporaryDirectory(prefix="allranks-test-") as folder:
        payload = Path(folder) / "payload"
        payload.write_bytes(pickle.dumps((sys.path, timeout_s, pickling.dumps((fn, args)))))
        done = mpirun(mpi, ranks, __file__, str(payload), timeout_s=timeout_s, **environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return [pickle.loads(Path(f"{payload}.{rank}").read_bytes()) for rank in range(ranks)]


def _main(payload: str) -> None:
    path, timeout_s, called = pickle.loads(Path(payload).read_bytes())
    sys.path += [folder for folder in path if folder not in sys.path]
    import torch

    import allranks

    torch.set_num_threads(1)
    fn, args = cloudpickle.loads(called)
    allranks.init_process_group("mpi", timeout=timeout_s)
    rank = allranks.get_rank()
    Path(f"{payload}.{rank}").write_bytes(pickle.dumps(fn(*args)))
    if allranks.is_initialized():
        allranks.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
