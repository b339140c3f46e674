"""Write the job files in examples/jobs: the output of the commands in examples/README.md on a reader's machine.

    python tests/house/jobs.py    # writes them; `make format` does

A job file contains the interpreter, the virtual environment and the folder from which it was submitted. Here they are
paths below /home/you/allranks. Each manifest has a new secret; here it is one that allranks refuses as too short.
test_jobs.py compares the files with the output of the commands.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "jobs"
HOME = "/home/you/allranks"
SECRET = "no secret yet"
COMMAND = re.compile(r"^    allranks (submit .*) > (examples/jobs/\S+)$", re.MULTILINE)


def commands() -> dict[Path, list[str]]:
    """Return the arguments of each command, by the file that it writes."""
    text = (ROOT / "examples" / "README.md").read_text()
    return {ROOT / name: shlex.split(words) for words, name in COMMAND.findall(text)}


def text_of(words: list[str]) -> str:
    """Return the output of the command, with the paths and the secret replaced."""
    done = subprocess.run(
        [sys.executable, "-m", "allranks", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text = re.sub(r'(ALLRANKS_SECRET: )"[0-9a-f]{64}"', rf'\1"{SECRET}"', done.stdout)
    for here, there in ((sys.executable, f"{HOME}/.venv/bin/python"), (sys.prefix, f"{HOME}/.venv"), (ROOT, HOME)):
        text = text.replace(os.fspath(here), there)
    return text


if __name__ == "__main__":
    for file, words in commands().items():
        file.write_text(text_of(words))
