"""Standard input: a single rank or the rank of --stdin has the stdin and the terminal of the launcher."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from support.console import Console
from support.launcher_process import Launcher
from support.marked import wait_for

pytestmark = pytest.mark.timeout(60)
BREAK = "x = 5\nbreakpoint()\nprint('after', x)"
ECHO = "import os, sys; print('rank', os.environ['RANK'], 'read', repr(sys.stdin.read()))"


def alone(launcher: Launcher, script: str, *options: str, environ: dict[str, str] | None = None) -> Console:
    """Start the command as the only one of its session. No shell could continue it after a stop."""
    return Console(launcher, *launcher.command(*options, str(launcher.write(script))), environ=environ)


def shell(launcher: Launcher, script: str, *options: str, after: str = "") -> Console:
    """Start the command as a job of an interactive shell."""
    console = Console(launcher, "bash", "--norc", "--noprofile", "-i")
    console.expect(r"\$ ")
    console.press(f"{shlex.join(launcher.command(*options, launcher.write(script).name))} {after}\n")
    return console


def piped(launcher: Launcher, script: str, *options: str) -> tuple[int, list[str]]:
    words = launcher.command(*options, str(launcher.write(script)))
    done = subprocess.run(
        words, cwd=launcher.folder, env=launcher.environ(), input="words\n", capture_output=True, text=True, check=False
    )
    return done.returncode, sorted(done.stdout.splitlines())


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def waits_for_a_key(pid: int) -> bool:
    """Return whether a process waits for a key. An earlier Ctrl-C has no effect until the next key."""
    where = Path(f"/proc/{pid}/wchan").read_text()  # do_select or poll_schedule_timeout, depending on the kernel
    return "select" in where or "poll" in where


def ranks(launcher: Launcher) -> list[int]:
    """Return the pids that ranks have written to files. A file may exist before its content."""
    return [int(text) for file in launcher.folder.glob("rank*") if (text := file.read_text())]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_breakpoint_works_in_a_single_rank(launcher: Launcher, start: str) -> None:
    console = alone(launcher, BREAK, "--start", start)
    console.expect(r"\(Pdb\) ")
    console.press("p x * 100\n")
    console.expect("^500", r"\(Pdb\) ")
    console.press("c\n")
    console.expect("^after 5")
    assert console.end()[0] == 0


def test_single_rank_has_the_terminal_of_the_launcher(launcher: Launcher) -> None:
    script = """
        import os
        tty = open("/dev/tty")
        print([os.isatty(n) for n in range(3)], len({os.ttyname(n) for n in range(3)}), tuple(os.get_terminal_size(0)))
        import readline
        input("more? ")
        print(os.tcgetpgrp(0) == os.getpgrp() == os.getpid(), tuple(os.get_terminal_size(1)))
        """
    console = alone(launcher, script)
    console.expect(r"^\[True, True, True\] 1 \(80, 24\)", r"more\? ")
    console.resize(50, 100)
    console.press("yess\x7f\n")
    console.expect(r"^True \(100, 50\)")
    assert console.end()[0] == 0


@pytest.mark.parametrize(
    "options", [["--logs", "logs"], ["--timestamps"], ["--idle-timeout", "1m"], ["-t", "3"], ["-q", "--show", "none"]]
)
def test_single_rank_whose_output_is_captured_reads_the_terminal(launcher: Launcher, options: list[str]) -> None:
    """Check that the rank reads from the terminal although its output is captured or hidden."""
    console = alone(launcher, "print('asks'); open('said', 'w').write(input())", *options)
    console.press("words\n")
    assert console.end()[0] == 0
    assert (launcher.folder / "said").read_text() == "words"
    if options[0] == "--logs":
        assert (launcher.folder / "logs" / "rank0.log").read_text() == "asks\n"


def test_breakpoint_stops_only_the_rank_of_the_stdin_option(launcher: Launcher) -> None:
    """Check that the other ranks skip the breakpoint. They would soon have to wait for this rank."""
    console = alone(launcher, BREAK, "-n", "3", "--stdin", "1")
    console.expect(r"^\[1\] \(Pdb\) ")
    console.press("p x * 100\n")
    console.expect(r"^\[1\] 500", r"\(Pdb\) ")
    console.press("c\n")
    code, text = console.end()
    assert code == 0
    assert sorted(re.findall(r"\[\d\] after 5", text)) == [f"[{rank}] after 5" for rank in range(3)]


def test_lines_of_other_ranks_do_not_break_a_prompt(launcher: Launcher) -> None:
    script = """
        import os, readline, time
        from pathlib import Path
        if os.environ["RANK"] == "1": print(input("what? ") + "!")
        else:
            while not Path("go").exists(): time.sleep(0.01)
            print("a line"); print("an open one", end="", flush=True); time.sleep(1)
        """
    console = alone(launcher, script, "-n", "2", "--stdin", "1")
    console.expect(r"\[1\] what\? ")
    (launcher.folder / "go").touch()
    console.expect(r"^.*\[0\] a line", r"^\[1\] what\? ")
    console.press("this\n")
    console.expect(r"\[1\] this!")  # the unterminated line may be there until it is erased
    assert console.end()[0] == 0


def test_rank_of_the_stdin_option_sees_the_new_window_size(launcher: Launcher) -> None:
    script = """
        import os, readline, time
        if os.environ["RANK"] == "0": open("rank0", "w").write(str(os.getpid()))
        while os.environ["RANK"] == "0": input(str(os.get_terminal_size()))
        time.sleep(60)
        """
    console = alone(launcher, script, "-n", "2", "--stdin", "0")
    console.expect("columns=76, lines=24")
    console.resize(50, 104)
    # The launcher checks the size when it has output to show.
    wait_for(lambda: console.press("\n") or "columns=100, lines=50" in console.expect(r"columns=\d+, lines=\d+"))
    (pid,) = ranks(launcher)
    wait_for(lambda: waits_for_a_key(pid))
    console.press("\x03")
    assert console.end()[0] == 130


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("breakpoint()\n'here'", "a debugger reads from stdin, but stdin of rank {} is empty"),
        ("import pdb\ndef f():\n    pdb.set_trace()\n    return 1\nf()", "a debugger reads from stdin"),
        ("input('name? ')", "input() reads from stdin, but stdin of rank {} is empty"),
    ],
)
def test_error_of_reading_empty_stdin_names_the_option(launcher: Launcher, script: str, said: str) -> None:
    done = launcher.script(script, "-n", "2")
    assert done.code == 1
    rank = done.err.partition("rank ")[2][0]
    assert f"UsageError: {said.format(rank)}" in done.err
    assert f"Use `allranks run --stdin {rank}`" in done.err
    assert "BdbQuit" not in done.err + done.out
    assert "bdb.py" not in done.err


def test_other_failures_without_stdin_are_unchanged(launcher: Launcher) -> None:
    for script, said in (
        ("import pickle; pickle.loads(b'')", "EOFError: Ran out of input"),
        ("raise EOFError", "EOFError\n"),
        (ECHO + "; sys.exit(3)", "exited with code 3"),
    ):
        assert said in launcher.script(script, "-n", "2").err
    for environ in ({"PYTHONBREAKPOINT": "0"}, {"PYTHONBREAKPOINT": "os.getpid"}):
        assert launcher.script("breakpoint()", "-n", "2", environ=environ).code == 0


def test_excepthook_of_the_program_receives_the_stdin_error(launcher: Launcher) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print('hook:', error, file=sys.stderr)\n"
    assert "hook: input() reads from stdin, but stdin of rank" in launcher.script(hook + "input()", "-n", "2").err


def test_piped_stdin_is_read_by_a_single_rank_or_the_rank_of_the_option(launcher: Launcher) -> None:
    read, empty = "rank {} read 'words\\n'", "rank {} read ''"
    assert piped(launcher, ECHO) == (0, ["[0] " + read.format(0)])
    assert piped(launcher, ECHO, "--start", "spawn") == (0, ["[0] " + read.format(0)])
    assert piped(launcher, ECHO, "--stdin", "none") == (0, ["[0] " + empty.format(0)])
    assert piped(launcher, ECHO, "-n", "2") == (0, [f"[{rank}] {empty.format(rank)}" for rank in (0, 1)])
    second = ["[0] " + empty.format(0), "[1] " + read.format(1), "[2] " + empty.format(2)]
    assert piped(launcher, ECHO, "-n", "3", "--stdin", "1") == (0, second)
    launcher.program = ("allranks", "torchrun")
    assert piped(launcher, ECHO) == (0, ["[0] " + read.format(0)])


def test_lines_that_no_rank_reads_stay_in_stdin(launcher: Launcher) -> None:
    """Check that unread lines stay in stdin, as ``while read line; do allranks run ...`` requires."""
    words = shlex.join(launcher.command(str(launcher.write("pass"))))
    done = subprocess.run(
        ["sh", "-c", f"{words}; cat"],
        cwd=launcher.folder,
        env=launcher.environ(),
        input=b"words\n",
        capture_output=True,
        check=False,
    )
    assert done.stdout == b"words\n", done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "--stdin", "2"], "--stdin 2: no such rank; expected 0 to 1, or none"),
        (["--stdin", "-1"], "'-1' is not a whole number"),
        (["--stdin", "0", "-H", "a,b"], "--stdin 0: only ranks of a job on one host can have stdin"),
        (["--stdin", "0", "-N", "2", "--node-rank", "0"], "only ranks of a job on one host can have stdin"),
    ],
)
def test_invalid_rank_for_stdin_is_rejected(launcher: Launcher, words: list[str], said: str) -> None:
    done = launcher.script("raise SystemExit('must not run')", *words)
    assert done.code == 2
    assert said in done.err


def test_ctrl_c_at_a_prompt_is_handled_by_the_debugger(launcher: Launcher) -> None:
    console = alone(launcher, "import os; open('rank0', 'w').write(str(os.getpid()))\n" + BREAK)
    console.press("p x * 100\n")
    console.expect("500$", r"\(Pdb\) ")
    console.press("oops")
    console.expect("oops")
    (pid,) = ranks(launcher)
    wait_for(lambda: waits_for_a_key(pid))
    console.press("\x03")
    console.expect("--KeyboardInterrupt--", r"\(Pdb\) ")
    console.press("c\n")
    console.expect("^after 5")
    assert console.end()[0] == 0


@pytest.mark.parametrize("options", [["-n", "1"], ["-n", "2", "--stdin", "1"]])
def test_ctrl_c_ends_the_job_after_a_rank_has_read_stdin(launcher: Launcher, options: list[str]) -> None:
    script = """
        import os, time
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1: input("name? ")
        print("going on")
        open("going" + os.environ["RANK"], "w").close()
        time.sleep(60)
        """
    console = alone(launcher, script, *options)
    console.press("me\n")
    wait_for(lambda: len(list(launcher.folder.glob("going*"))) == int(options[1]))
    console.expect("going on")
    console.press("\x03")
    code, text = console.end()
    assert code == 130
    assert "allranks run: stopped by SIGINT\n" in text
    assert re.search(r": at script\.py:[4-6] in <module>", text)
    assert "Traceback" not in text


def test_ctrl_c_ends_a_command_that_has_read_stdin(launcher: Launcher) -> None:
    words = ["sh", "-c", "read line; echo $line; exec sleep 60"]
    console = Console(launcher, *launcher.command("-n", "1", "--", *words))
    console.press("begin\n")
    console.expect("^begin", "^begin")
    console.press("\x03")
    code, text = console.end()
    assert (code, "stopped by SIGINT" in text) == (130, True), text


def test_ctrl_z_at_a_prompt_returns_to_the_shell(launcher: Launcher) -> None:
    """Press Ctrl-Z at a prompt: the shell takes the terminal and returns it with ``fg``."""
    console = shell(launcher, BREAK)
    for _ in range(2):
        console.expect(r"\(Pdb\) ")
        console.press("\x1a")
        console.expect("Stopped", r"\$ ")
        console.press("echo $((6 * 7))\n")
        console.expect("^42", r"\$ ")
        console.press("fg\n")
        console.expect("fg$", r"script\.py")
        console.wait_for_foreground()
        console.press("p x * 100\n")
        console.expect("^500")
    console.press("c\n")
    console.expect("^after 5", r"\$ ")
    console.press("exit $?\n")
    assert console.end()[0] == 0


def test_ctrl_z_stops_all_ranks(launcher: Launcher) -> None:
    """Stop ranks that have not read stdin, continue them in the background, and end them with Ctrl-C."""
    script = """
        import os, time
        open("rank" + os.environ["RANK"], "w").write(str(os.getpid()))
        print("up")
        time.sleep(60)
        """
    console = shell(launcher, script, "-n", "3")
    console.expect("up")
    wait_for(lambda: len(ranks(launcher)) == 3)  # do not count lines: an unterminated line may be shown twice
    console.press("\x1a")
    console.expect("Stopped", r"\$ ")
    pids = ranks(launcher)
    wait_for(lambda: [state(pid) for pid in pids] == ["T"] * 3)
    console.press("bg\n")
    console.expect(r"\$ ")
    wait_for(lambda: [state(pid) for pid in pids] == ["S"] * 3)
    console.press("fg\n")
    console.expect("fg$", r"script\.py")
    console.wait_for_foreground()
    console.press("\x03")
    console.expect("stopped by SIGINT", r"\$ ")
    console.press("exit\n")
    assert console.end()[0] == 130


def test_rank_in_the_background_waits_for_the_terminal(launcher: Launcher) -> None:
    console = shell(launcher, BREAK, after="&")
    console.expect("-> print")
    wait_for(lambda: console.press("\n") or "Stopped" in console.expect(r"Stopped|\$ "))
    console.press("fg\n")
    console.expect("fg$", r"script\.py")
    console.wait_for_foreground()
    console.press("p x * 100\n")
    console.expect("500$")
    console.press("c\n")
    console.expect("after 5$", r"\$ ")
    console.press("exit\n")
    assert console.end()[0] == 0


def test_ctrl_z_has_no_effect_without_a_shell(launcher: Launcher) -> None:
    """Check that a job without a shell, as in a container, continues. No shell could continue it."""
    console = alone(launcher, BREAK)
    console.expect(r"\(Pdb\) ")
    console.press("\x1a")
    console.press("p x * 100\n")
    console.expect("^500")
    console.press("c\n")
    assert console.end()[0] == 0


@pytest.mark.parametrize("who", ["launcher", "rank"])
def test_terminal_is_restored_after_a_kill(launcher: Launcher, who: str) -> None:
    """Kill the launcher or the rank in a shell script. Its shell does not restore the terminal."""
    script = """
        import os, readline
        open("rank0", "w").write(f"{os.getpid()} {os.getppid()}")
        input("prompt ")
        """
    words = shlex.join(launcher.command("-n", "1", str(launcher.write(script))))
    console = Console(launcher, "bash", "--norc", "-c", f"{words}; stty -a; read -p 'more? ' x; echo got $x")
    console.expect("prompt ")
    wait_for(lambda: len((launcher.folder / "rank0").read_text().split()) == 2)
    rank, parent = map(int, (launcher.folder / "rank0").read_text().split())
    os.kill(parent if who == "launcher" else rank, signal.SIGKILL)
    console.expect(r" echo ", r"more\? ")
    console.press("words\n")
    console.expect("^got words")
    assert console.end()[0] == 0


def test_closed_terminal_ends_the_job(launcher: Launcher) -> None:
    console = shell(launcher, BREAK)
    console.expect(r"\(Pdb\) ")
    os.close(console._fd)
    console.process.wait(20)
    assert not launcher.wait_gone(10)
