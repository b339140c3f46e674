"""The digits example, started as users start it. If only the result matters, the test forks the ranks itself."""

import contextlib
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from allranks import checkpoint
from allranks.testing import run_ranks
from support import warm
from support.shown import assert_as_shown

TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
LAST_LINE = re.compile(r"test accuracy ([\d.]+)%, (\d) ranks?, [\d.]+ s, [\d.]+% of it communicating, weights (\w{12})")


def environment():
    """Return the environment of this process, without variables that a launcher of the tests may have set."""
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in mine and not k.startswith("ALLRANKS_")}


def run(*args, ranks=2, launcher=True):
    prefix = ["-m", "allranks", "run", "-n", ranks] if launcher else []
    command = [sys.executable, *map(str, [*prefix, TRAIN, *args])]
    return warm.run(command, timeout=100, env=environment())


def on_rank(runs):
    """Run the example once per list of arguments. Return the exit code and the output on this rank of each run."""
    ended = []
    for args in runs:
        out, err = io.StringIO(), io.StringIO()
        sys.argv = [str(TRAIN), *map(str, args)]
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(TRAIN), run_name="__main__")
            except SystemExit as end:
                code = end.code
        ended.append((code, out.getvalue(), err.getvalue()))
    return ended


def train(*runs, ranks=2):
    """Return accuracy, number of ranks and fingerprint from the last line of each run.

    The same ranks execute all runs in sequence, because the imports of the example take longer than a run.
    """
    results = []
    for ended in zip(*run_ranks(ranks, on_rank, runs, timeout_s=100, init=False), strict=True):
        assert all(code == 0 for code, _, _ in ended), ended
        ((accuracy, size, weights),) = LAST_LINE.findall("".join(out for _, out, _ in ended))
        results.append((float(accuracy) / 100, int(size), weights))
    return results


def model_in(folder):
    return checkpoint.load(folder / "model.pt")["model"]


def test_defaults_reach_97_percent_and_draw_a_picture(tmp_path):
    result = run("--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    accuracy, size, _ = LAST_LINE.findall(result.stdout)[0]
    assert float(accuracy) >= 97
    assert size == "2"
    assert_as_shown("digits", result.stdout.replace(str(tmp_path), "out/digits"))
    assert result.stderr == ""  # no progress bar in a pipe
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")
    assert 800 <= width <= 3000
    assert 400 <= height <= 2000
    assert len(picture) > 10_000
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "model.pt"]


def test_weights_do_not_depend_on_rank_count_or_synchronization_method(tmp_path):
    runs = {"one": (1, "ddp"), "two": (2, "ddp"), "by hand": (2, "manual")}
    for ranks in (1, 2):
        mine = {name: sync for name, (its_ranks, sync) in runs.items() if its_ranks == ranks}
        common = ("--epochs", 1, "--dtype", "float64")
        trained = train(
            *((*common, "--sync", sync, "--out", tmp_path / name) for name, sync in mine.items()), ranks=ranks
        )
        assert [size for _, size, _ in trained] == [ranks] * len(mine)
    one, two, by_hand = (model_in(tmp_path / name) for name in runs)
    for name, reference in one.items():
        assert reference.dtype == torch.float64
        assert (two[name] - reference).abs().max() <= 1e-10 * reference.abs().max()
        assert (by_hand[name] - reference).abs().max() <= 1e-10 * reference.abs().max()


def kill_once_saved(job, folder, child):
    """Kill the child of the launcher with index ``child`` after the first checkpoint, and return its pid."""
    until = time.monotonic() + 60
    while checkpoint.latest(folder) is None:
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.001)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    pid = int(children[child])
    os.kill(pid, signal.SIGKILL)
    return pid


def killed_and_started_again(folder, *args):
    """Return the fingerprint of a run in which a rank is killed after the first checkpoint, with one restart."""
    words = ["run", "-n", 2, "--restarts", 1, TRAIN, "--out", folder, "--checkpoints", folder / "kept", *args]
    command = [sys.executable, "-m", "allranks", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as job:
        kill_once_saved(job, folder / "kept", -1)  # index -1: the last rank; the first child is the guard
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert "was killed by SIGKILL" in err
    assert "restarting (1 of 1)" in err
    return LAST_LINE.findall(out)[0][2]


def test_resumed_training_equals_uninterrupted_training(tmp_path):
    def options(name, epochs, every):
        return (
            "--epochs",
            epochs,
            "--out",
            tmp_path / name,
            "--checkpoints",
            tmp_path / f"{name}-kept",
            "--save-every",
            every,
        )

    (_, _, straight), _, (_, _, again) = train(options("a", 8, 2), options("b", 4, 3), options("a", 8, 2))
    assert again == straight  # the training was already complete
    ((_, _, resumed),) = train(options("b", 8, 3))
    assert resumed == straight
    assert killed_and_started_again(tmp_path / "c", "--epochs", 8, "--save-every", 2) == straight
    a, b = (checkpoint.load(tmp_path / name / "model.pt") for name in "ab")
    assert len(b["history"]) == 8
    assert a.pop("settings") == b.pop("settings")
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def killed_in_an_elastic_run(folder, rank, *args):
    """Return the output of a run on three ranks, one of which is killed after the first checkpoint."""
    words = ["run", "-n", 3, "--elastic", 2, *args, "--out", folder, "--checkpoints", folder / "kept"]
    command = [sys.executable, "-m", "allranks", *map(str, words), "--save-every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as job:
        pid = kill_once_saved(job, folder / "kept", -3 + rank)  # the ranks are the last children
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert f"rank {rank} (pid {pid}) was killed by SIGKILL; " in err
    return out, err


@pytest.mark.timeout(300)
def test_elastic_run_continues_after_a_rank_is_killed(tmp_path):
    """Kill a rank with and without respawns.

    A replacement process leads to the same weights. Without a replacement, the remaining ranks continue, and a new
    rank 0 saves the model.
    """
    options = ("--epochs", 8, "--batch-size", 63)
    ((_, _, calm),) = train((*options, "--out", tmp_path / "calm"), ranks=3)
    out, err = killed_in_an_elastic_run(tmp_path / "replaced", 1, TRAIN, *options)
    assert "restarted (1 of 3)" in err
    assert [found[1:] for found in LAST_LINE.findall(out)] == [("3", calm)]
    out, _ = killed_in_an_elastic_run(tmp_path / "fewer", 0, "--respawns", 0, TRAIN, *options)
    ((accuracy, size, fewer),) = LAST_LINE.findall(out)
    assert (size, fewer == calm) == ("2", False)
    assert float(accuracy) > 80
    assert set(model_in(tmp_path / "fewer")) == set(model_in(tmp_path / "calm"))


def test_equal_runs_give_equal_weights_and_other_seeds_differ(tmp_path):
    runs = (("--epochs", 1, "--out", tmp_path, "--seed", seed) for seed in (0, 0, 1))
    (_, _, first), (_, _, second), (_, _, other) = train(*runs)
    assert first == second
    assert first != other


def test_example_without_a_launcher_runs_as_one_process(tmp_path):
    result = run("--epochs", 3, "--out", tmp_path, "--plot", tmp_path / "p" / "x.png", launcher=False)
    assert result.returncode == 0, result.stdout + result.stderr
    ((accuracy, size, _),) = LAST_LINE.findall(result.stdout)
    assert size == "1"
    assert float(accuracy) > 80
    assert (tmp_path / "p" / "x.png").exists()


def test_ranks_can_be_started_separately_with_init_method(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--epochs", "1", "--out", tmp_path, "--init-method", f"tcp://127.0.0.1:{port}", "--world-size", "2"]
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, [TRAIN, *common, "--rank", rank])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    zero, one = (process.communicate(timeout=100)[0] for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], zero + one
    assert LAST_LINE.fullmatch(zero.splitlines()[-1]).group(2) == "2"
    assert one == ""


WRONG = {
    "--epochs": ["--epochs", "0"],
    "--lr": ["--lr", "fast"],
    "telepathy": ["--sync", "telepathy"],
    "--nonsense": ["--nonsense"],
    "carrier": ["--init-method", "carrier://pigeon", "--world-size", "2", "--rank", "0"],
    "semaphore": ["--backend", "semaphore"],
}


@pytest.fixture(scope="module")
def ended_by_wrong_arguments(tmp_path_factory):
    runs = [["--out", tmp_path_factory.mktemp("out"), *wrong] for wrong in WRONG.values()]

    def unlaunched():
        unset = os.environ.keys() - environment().keys()
        for name in unset:
            del os.environ[name]
        return on_rank(runs)

    return dict(zip(WRONG, run_ranks(1, unlaunched, init=False)[0], strict=True))


@pytest.mark.parametrize("says", WRONG)
def test_wrong_arguments_print_one_line_and_exit_with_2(ended_by_wrong_arguments, says):
    code, out, err = ended_by_wrong_arguments[says]
    assert code == 2
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1, err


def test_indivisible_batch_size_is_refused(tmp_path):
    result = run("--out", tmp_path, "--batch-size", 63)
    assert result.returncode == 2
    assert (result.stdout + result.stderr).count("--batch-size 63 cannot be divided among 2 ranks") >= 1
    assert "Traceback" not in result.stdout + result.stderr


def test_resuming_with_other_settings_is_refused(tmp_path):
    common = ("--out", tmp_path, "--checkpoints", tmp_path / "kept")
    train(("--epochs", 1, *common), ranks=1)
    result = run("--epochs", 2, *common, "--lr", 0.5, launcher=False)
    assert result.returncode == 2
    assert "lr 0.05, not 0.5" in result.stderr
    assert (result.stdout, len(result.stderr.splitlines())) == ("", 1), result.stderr
