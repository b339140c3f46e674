"""``allranks completion``: prints the script that completes commands, options and their values in bash, zsh or fish.

The scripts are files of the package, so that a shell that requests one at startup does not wait for torch.
``python -m allranks.tools.completion`` writes them and the manual pages from the parsers of all commands.

============  ================================================
``tree``      all commands as data, from the parsers
``bash``      the script for bash
``zsh``       the script for zsh
``fish``      the script for fish
``manual``    the manual pages
``__main__``  writes them all
============  ================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks._base.console import ArgumentParser, put

__all__ = ["main"]

_SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    """Run the command. Return the exit code."""
    parser = ArgumentParser(
        prog="allranks completion",
        description="Print the script with which a shell completes the commands, options and values of allranks.",
        examples=(
            ("source <(allranks completion bash)", "in ~/.bashrc; source <(allranks completion zsh) in ~/.zshrc"),
            ("allranks completion fish >~/.config/fish/completions/allranks.fish", "once, for fish"),
        ),
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    shell = parser.parse_args(argv).shell
    put((Path(__file__).parent / "scripts" / f"allranks.{shell}").read_text(encoding="utf-8"))
    return 0
