"""Modules that ranks have after the fork: torch, unless the script does not use it."""

from __future__ import annotations

import pytest

from support.launcher_process import Launcher

LOOK = "import sys\nprint('torch' in sys.modules)\n"


@pytest.mark.parametrize(
    ("more", "loaded"),
    [
        ("import os.path, json\nfrom collections import abc\n", False),
        ("def later():\n    import torch.nn\n", True),
        ("try:\n    from beside import what\nexcept ImportError:\n    pass\n", True),
        ("from importlib import import_module\n", True),
        ("if sys.argv[1:]:\n    __import__(sys.argv[1])\n", True),
    ],
)
def test_torch_is_preloaded_if_the_script_may_use_it(launcher: Launcher, more: str, loaded: bool) -> None:
    launcher.write(LOOK + more)
    done = launcher.run("-n", "1", "script.py")
    assert (done.code, done.out) == (0, f"[0] {loaded}\n")


def test_script_with_a_syntax_error_fails_with_that_error(launcher: Launcher) -> None:
    done = launcher.script("import torch (", "-n", "2")
    assert done.code == 1
    assert "SyntaxError" in done.err


def test_import_error_of_torch_is_raised_in_the_rank(launcher: Launcher) -> None:
    """Check that the rank raises any import error of torch, as in a new interpreter."""
    launcher.write("raise RuntimeError('no such thing')", "fake/torch.py")
    done = launcher.script("try:\n    import torch\nexcept RuntimeError as error:\n    print(error)", "-n", "1")
    assert (done.code, done.out, done.err) == (0, "[0] no such thing\n", "")


def test_variables_that_are_set_before_the_import_of_torch_take_effect(launcher: Launcher) -> None:
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())"
    done = launcher.script(script, "-n", "1", real_torch=True)
    assert (done.code, done.out) == (0, "[0] 2\n")


@pytest.mark.parametrize("start", [[], ["--start", "spawn"]])
def test_original_command_line_starts_with_the_program(launcher: Launcher, start: list[str]) -> None:
    """Check ``sys.orig_argv``, which programs read to restart themselves."""
    launcher.write("import sys\nprint(sys.orig_argv[1:])")
    done = launcher.run("-n", "1", *start, "script.py", "--flag")
    assert (done.code, done.out) == (0, "[0] ['script.py', '--flag']\n")
