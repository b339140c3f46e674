"""What ranks are forked with: torch, unless a script has no use for it."""

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
def test_torch_is_imported_where_it_may_be_used(launcher: Launcher, more: str, loaded: bool) -> None:
    launcher.write(LOOK + more)
    done = launcher.run("-n", "1", "script.py")
    assert (done.code, done.out) == (0, f"[0] {loaded}\n")


def test_a_script_that_is_none(launcher: Launcher) -> None:
    done = launcher.script("import torch (", "-n", "2")
    assert done.code == 1
    assert "SyntaxError" in done.err


def test_a_torch_that_cannot_be_imported(launcher: Launcher) -> None:
    """The rank meets the error, as in a fresh interpreter; whatever it is."""
    launcher.write("raise RuntimeError('no such thing')", "fake/torch.py")
    done = launcher.script("try:\n    import torch\nexcept RuntimeError as error:\n    print(error)", "-n", "1")
    assert (done.code, done.out, done.err) == (0, "[0] no such thing\n", "")


def test_a_program_sees_what_it_has_set_before_it_imports_torch(launcher: Launcher) -> None:
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())"
    done = launcher.script(script, "-n", "1", real_torch=True)
    assert (done.code, done.out) == (0, "[0] 2\n")


@pytest.mark.parametrize("start", [[], ["--start", "spawn"]])
def test_a_program_finds_itself_in_the_command_line(launcher: Launcher, start: list[str]) -> None:
    """Programs that start themselves again read it there."""
    launcher.write("import sys\nprint(sys.orig_argv[1:])")
    done = launcher.run("-n", "1", *start, "script.py", "--flag")
    assert (done.code, done.out) == (0, "[0] ['script.py', '--flag']\n")
