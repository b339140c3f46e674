"""Completion in three shells, manual pages and help: generated from the parsers, up to date and readable."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.tools.commands import COMMANDS, EXAMPLES
from allranks.tools.completion import main
from allranks.tools.completion.__main__ import files
from allranks.tools.completion.tree import CliCommand, collect

SCRIPTS = Path(sys.modules["allranks.tools.completion"].__file__ or "").parent / "scripts"
WRITTEN = files()
EVERY = [command for top in collect() for command in top.walk()]
WIDTH = 80

# Text before the cursor, and the completions that every shell offers.
CASES = {
    "allranks r": {"run"},
    "allranks help to": {"top", "torchrun"},
    "allranks run --sho": {"--show"},
    "allranks run --show ": {"0", "all", "none"},
    "allranks run --nnodes 2 -n 4 wor": {"work.py", "works"},
    "allranks run --logs wor": {"works"},
    "allranks run work.py --sho": set(),  # an option of the script
    "allranks run -n 2 -- echo wor": {"work.py", "works"},
    "allranks trace ti": {"timeline"},
    "allranks trace timeline --la": {"--last"},
    "allranks checkpoint merge --in": {"--into"},
    "allranks bench --op ": {"SUM", "AVG", "PRODUCT", "MIN", "MAX"},
    "allranks bench all_r": {"all_reduce"},
    "allranks completion ": {"bash", "fish", "zsh"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").touch()
    (tmp_path / "works").mkdir()
    return tmp_path


def shell(name: str) -> str:
    """Return the path of a shell, or skip the test. CI has all shells."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("ALLRANKS_TEST_ALL"), f"{name} is missing"
        pytest.skip(f"{name} is missing")
    return found


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_command_prints_the_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == (SCRIPTS / f"allranks.{name}").read_text()


def test_completion_command_does_not_import_torch() -> None:
    code = (
        "import sys; from allranks.__main__ import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_completion_in_bash(folder: Path) -> None:
    code = """
    source "$1"; shift
    compopt() { :; }
    for line in "$@"; do
      COMP_LINE=$line COMP_POINT=${#line}
      _allranks
      echo "${COMPREPLY[*]}"
    done
    """
    done = subprocess.run(
        [shell("bash"), "-c", code, "bash", str(SCRIPTS / "allranks.bash"), *CASES],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(CASES, found, strict=True)) == CASES


def test_completion_in_fish(folder: Path) -> None:
    code = "source $argv[1]; for line in $argv[2..]; echo :; complete -C $line; end"
    environ = {
        **os.environ,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "XDG_DATA_HOME": str(folder / ".data"),
    }
    done = subprocess.run(
        [shell("fish"), "--no-config", "-c", code, str(SCRIPTS / "allranks.fish"), *CASES],
        cwd=folder, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = [
        {line.partition("\t")[0].rstrip("/") for line in part.splitlines()} - {""}
        for part in done.stdout.split(":\n")[1:]
    ]
    assert dict(zip(CASES, found, strict=True)) == CASES


ZSH = """
bindkey -e
autoload -Uz compinit && compinit -u -D && source "$SCRIPT"
compadd() {  # records what is offered
  local found=()
  builtin compadd -O found "$@"
  print -rl -- $found >>$OFFERED
  builtin compadd "$@"
}
record() {
  local line
  for line in "${(@f)$(<$LINES_FILE)}"; do
    print -r -- :: >>$OFFERED
    BUFFER=$line CURSOR=$#line
    zle list-choices
  done
  print end >>$OFFERED
  BUFFER=exit
  zle accept-line
}
zle -N record && bindkey '^X' record
print read''y
"""


def test_completion_in_zsh(folder: Path) -> None:
    """Complete in a pseudo-terminal, because zsh completes only in its line editor."""
    zsh = shell("zsh")
    files = {name: folder.parent / f"{folder.name}.{name}" for name in ("start", "lines", "offered")}
    files["start"].write_text(ZSH)
    files["lines"].write_text("\n".join(CASES))
    environ = {
        **os.environ, "SCRIPT": str(SCRIPTS / "allranks.zsh"), "OFFERED": str(files["offered"]), "TERM": "dumb",
        "LINES_FILE": str(files["lines"]),
    }  # fmt: skip
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(zsh, [zsh, "-f", "-i"], environ)
    try:
        os.write(fd, f"source {files['start']}\n".encode())
        read_until(fd, "ready")
        os.write(fd, b"\x18")  # Ctrl-X: record
        read_until(fd, None)
    finally:
        os.close(fd)
        os.waitpid(pid, 0)
    parts = files["offered"].read_text().removesuffix("end\n").split("::\n")[1:]
    found = [{word.rstrip("=/+") for word in part.splitlines()} - {""} for part in parts]
    assert dict(zip(CASES, found, strict=True)) == CASES


def read_until(fd: int, end: str | None) -> None:
    """Read a terminal until a word appears, or, if ``end`` is None, until its program has exited."""
    seen = ""
    limit = time.monotonic() + 60
    while end is None or end not in seen:
        assert time.monotonic() < limit, seen
        if not select.select([fd], [], [], 1)[0]:
            continue
        try:
            seen += os.read(fd, 1 << 16).decode(errors="replace")
        except OSError:  # the program has exited
            assert end is None, seen
            return


@pytest.mark.parametrize("command", EVERY, ids=lambda command: command.name.replace(" ", "-"))
def test_help_is_readable(command: CliCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = command.parser.format_help()
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert command.parser.examples
    for line, what in command.parser.examples:
        assert "allranks " in line
        assert what
    for option in command.options:
        assert option.help or not option.shown, f"{option.names} has no help"


def test_top_level_help_is_readable() -> None:
    command = [sys.executable, "-m", "allranks", "--help"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [line.split()[0] for line in lines[3 : 3 + len(COMMANDS)]] == list(COMMANDS)
    assert all(f"  {line}" in lines and f"      {what}" in lines for line, what in EXAMPLES)


def test_options_in_examples_exist() -> None:
    """Each option in an example is an option of the command before it."""
    of = {command.name: {name for option in command.options for name in option.names} for command in EVERY}
    for command in EVERY:
        for line, _ in (*command.parser.examples, *EXAMPLES):
            for part in re.findall(r"allranks ([^|&<>]*)", line):
                words = part.split()
                name = " ".join(words[:2]) if " ".join(words[:2]) in of else words[0]
                assert name in of, line
                for word in words:
                    if word.endswith(".py") or word == "--":
                        break
                    assert not word.startswith("-") or word in of[name], line


def test_every_command_has_a_manual_page() -> None:
    pages = {path.stem for path in WRITTEN if path.suffix == ".1"}
    assert pages == {"allranks", *("-".join(("allranks", *command.words)) for command in EVERY)}
    assert set(COMMANDS) == {command.name for command in EVERY if len(command.words) == 1}


def test_manual_pages_pass_mandoc_lint() -> None:
    mandoc = shell("mandoc")
    pages = [str(path) for path in WRITTEN if path.suffix == ".1"]
    linted = subprocess.run([mandoc, "-T", "lint", "-W", "error", *pages], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")
    (page,) = (page for page in pages if page.endswith("allranks-trace-timeline.1"))
    shown = subprocess.run([mandoc, "-T", "ascii", page], capture_output=True, text=True, check=True).stdout
    text = re.sub(".\x08", "", shown)
    assert "allranks trace timeline -o calls.html calls\n" in text
    assert re.search(r"-o, --output FILE\n +what to write", text)
