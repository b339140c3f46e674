"""Writes the completion scripts and the manual pages.

Run it in a clone of the repository after a change of the command line.
"""

from __future__ import annotations

from pathlib import Path

from allranks.tools.completion import bash, fish, manual, zsh
from allranks.tools.completion.tree import collect

__all__ = ["files"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[3]
_HEAD = "Written by python -m allranks.tools.completion from the commands' --help.\n"


def files() -> dict[Path, str]:
    """Return the text of each generated file, by its path in the repository."""
    commands = collect()
    scripts = {
        "bash": f"# Completes allranks in bash. {_HEAD}\n{bash.render(commands)}",
        "zsh": zsh.render(commands).replace("\n", f"\n# Completes allranks in zsh. {_HEAD}", 1),
        "fish": f"# Completes allranks in fish. {_HEAD}\n{fish.render(commands)}",
    }
    found = {_HERE / "scripts" / f"allranks.{shell}": text for shell, text in scripts.items()}
    return found | {_ROOT / "docs" / "man" / name: page for name, page in manual.pages(commands).items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
