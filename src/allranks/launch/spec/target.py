"""The target of the ranks, and the check whether it can be run.

A wrong name must cost one line and no time, not n tracebacks after a second of imports. Therefore the check precedes
every start, and runs none of the user's code.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import shlex
import shutil
import string
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from importlib.util import MAGIC_NUMBER
from typing import Literal

from allranks._base.errors import ConfigError

__all__ = [
    "MASTER",
    "SERVE",
    "Kind",
    "Mode",
    "Target",
    "check",
    "check_size",
    "find",
    "is_collection",
    "read_target",
    "set_first_path",
]

SERVE = "allranks.remote.worker.main"
"""The module that workers of master-worker mode run."""

MASTER = "ALLRANKS_MASTER"
"""The variable with the address of the master, for workers that the master has started."""

Mode = Literal["group", "master"]
Kind = Literal["script", "module", "command", "function"]


@dataclass(frozen=True)
class Target:
    """The program that every rank runs.

    Attributes:
        kind: a python script, a python module (``-m``), any command (``--``), or a python function.
        name: path of the script, dotted name of the module, first word of the command, or name of the function.
        args: the program's ``sys.argv[1:]``.
        macros: ``${local_rank}`` in the arguments is replaced by the local rank, as in torchrun.
        mode: in "master", only rank 0 runs the program, and the other ranks are its workers.
        payload: the function and its arguments, as ``function`` packs them.
    """

    kind: Kind
    name: str
    args: tuple[str, ...] = ()
    macros: bool = False
    mode: Mode = "group"
    payload: bytes = field(default=b"", repr=False)

    @property
    def is_python(self) -> bool:
        """True if a python interpreter runs the target, so that the launcher can fork ranks and receive reports."""
        return self.kind != "command"

    @property
    def has_workers(self) -> bool:
        """True if ranks are workers of master-worker mode."""
        return self.mode == "master" or self.name == SERVE

    def on(self, local_rank: int, rank: int = 0) -> Target:
        """Return the target that one rank runs."""
        if self.mode == "master" and rank:
            return Target("module", SERVE)
        if not self.macros:
            return self
        args = tuple(string.Template(word).safe_substitute(local_rank=local_rank) for word in self.args)
        return replace(self, args=args, macros=False)

    def words(self) -> str:
        """Return the target as a shell command line."""
        if self.kind == "function":
            return f"{self.name}()"
        return shlex.join(
            [*{"module": ["python", "-m"], "script": ["python"], "command": []}[self.kind], self.name, *self.args]
        )


def read_target(words: Sequence[str], as_module: bool, program: str, mode: Mode = "group") -> Target:
    """Parse the words after the options of a command line.

    Args:
        words: the words.
        as_module: -m was given.
        program: name of the command, for messages.
        mode: see ``Target``.

    Raises:
        ConfigError: the words are no target that could be run.
    """
    as_command = words[:1] == ["--"]
    if as_command and as_module:
        raise ConfigError("-m and -- are mutually exclusive")
    words = words[as_command:]
    if not words:
        what = "a command after --" if as_command else "a module after -m" if as_module else "a script, -m module or --"
        raise ConfigError(f"nothing to run: expected {what} (see {program} --help)")
    if as_command and mode == "master":
        raise ConfigError("--mode master requires a python program, which calls init_master_worker.\n  Remove the --.")
    kind: Kind = "command" if as_command else "module" if as_module else "script"
    return Target(kind, words[0], tuple(words[1:]), mode=mode)


def check_size(target: Target, size: int) -> None:
    """Check that the number of ranks is large enough for the target.

    Raises:
        ConfigError: a master would have no worker.
    """
    if target.mode == "master" and size < 2:
        raise ConfigError("--mode master: rank 0 is the master and needs at least one worker.\n  Use -n 2 or more.")


def check(target: Target, as_command: str = "--") -> None:
    """Check that the target can be run.

    Args:
        target: the target.
        as_command: the separator that the user types before a command.

    Raises:
        ConfigError: the target does not exist, or is of another kind.
    """
    if target.kind == "script":
        _check_script(target.name, target.args, as_command)
    elif target.kind == "module":
        _check_module(target.name)
    elif target.kind == "command":  # a function existed when it was packed
        _check_command(target.name)


def is_collection(path: str) -> bool:
    """Return whether a script is a folder or a zip file, whose ``__main__`` python runs."""
    return os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path))


def _check_script(name: str, args: Sequence[str], as_command: str) -> None:
    if is_collection(name):
        importer = pkgutil.get_importer(name)
        if importer is None or importer.find_spec("__main__") is None:
            what = "directory" if os.path.isdir(name) else "zip file"
            raise ConfigError(
                f"{name!r} is a {what} without a __main__.py, not a python script.\n  Specify the script in it."
            )
        return
    if not os.path.exists(name):
        hint = ""
        if shutil.which(name):
            command = shlex.join([name, *args])
            hint = f".\n  To run a command, put {as_command} before it: `{as_command} {command}`."
        raise ConfigError(f"cannot find script {name!r} in {os.getcwd()}{hint}")
    if not os.path.isfile(name):
        raise ConfigError(
            f"{name!r} is not a regular file, so the ranks cannot all read it.\n  Write the script to a file."
        )
    try:
        with open(name, "rb") as file:
            # At most 4 KiB, because a binary file may have no line end.
            head = file.readline(1 << 12)
            if name.endswith(".pyc"):
                if head[: len(MAGIC_NUMBER)] != MAGIC_NUMBER:
                    raise ConfigError(
                        f"{name!r} was compiled by another version of python, or is corrupted.\n"
                        "  Specify its *.py file."
                    )
                return
            program = head.startswith(b"\x7fELF")
            source = head + file.read() if _may_be_another(name, head) and not program else b""
    except OSError as error:
        raise ConfigError(f"cannot read script {name!r}: {error.strerror}") from None
    if program:
        raise ConfigError(f"{name!r} is a program, not a python script.\n  To run it, put {as_command} before it.")
    try:
        ast.parse(source)
    # ``ast.parse`` raises ValueError for null bytes, and RecursionError or MemoryError for deep nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        command = name if os.access(name, os.X_OK) else f"{_interpreter(head)} {name}"
        command = command if os.sep in command or " " in command else f".{os.sep}{command}"
        line = f" (line {error.lineno}: {error.msg})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(
            f"{name!r} is not a python script{line}.\n  To run a command, put {as_command} before it:"
            f" `{as_command} {command}`."
        ) from None


def _may_be_another(name: str, head: bytes) -> bool:
    """Return whether neither the name of a file nor its first line shows that it is python."""
    return not name.endswith((".py", ".pyw")) and not (head.startswith(b"#!") and b"python" in head)


def _interpreter(head: bytes) -> str:
    """Return the command that runs a file, according to its first line."""
    words = head.removeprefix(b"#!").split() if head.startswith(b"#!") else []
    if words[:1] and words[0].endswith(b"/env"):
        words = [word for word in words[1:] if not word.startswith(b"-")]
    return os.path.basename(words[0]).decode(errors="replace") if words else "sh"


def _check_module(name: str) -> None:
    set_first_path(os.getcwd())
    spec = find(name)
    if spec is None:
        raise ConfigError(
            f"cannot find python module {name!r}.\n  Install it, or run the command in the folder that contains it."
        )
    if spec.submodule_search_locations is not None and find(f"{name}.__main__") is None:
        raise ConfigError(
            f"{name!r} is a package without a __main__ module.\n  Specify one of its modules: -m {name}.MODULE."
        )


def set_first_path(folder: str) -> None:
    """Set ``sys.path[0]`` to the program's folder, as python does, unless an option prevents it (``-P``, ``-I``)."""
    if not getattr(sys.flags, "safe_path", bool(sys.flags.isolated)):
        sys.path[0] = folder


def find(name: str) -> ModuleSpec | None:
    """Find a module without importing its parent packages, which importlib.util.find_spec would import."""
    if not all(name.split(".")):
        return None
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        found = (finder.find_spec(".".join(parts[:depth]), path) for finder in sys.meta_path)
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _check_command(name: str) -> None:
    if shutil.which(name) is None:
        here = os.path.isfile(name)
        if here and not name.endswith(".py"):
            if os.sep in name:
                raise ConfigError(f"{name} is not executable.\n  Run chmod +x {name}.")
            raise ConfigError(f"cannot find command {name!r} in PATH.\n  To run the file in this folder, use ./{name}.")
        hint = ".\n  To run a python script, remove the --." if here else ""
        if not hint and os.sep not in name:
            hint = " in PATH.\n  Install it, or specify its path."
        raise ConfigError(f"cannot find command {name!r}{hint}")
