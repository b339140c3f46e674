"""The code blocks of the documents."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n?|\n(?=    ))+)")
OUTPUT = re.compile(
    r"\[0\]|allranks run:|\$ allranks trace show|(Mismatch|PeerLost|Checkpoint)Error:|4 ranks on 2 hosts|Not all ranks|"
    r"checkpoints/\n|node0: checkpoints/|AllranksError\(|>>> print"
)
"""Beginnings of blocks that show the output of a command or its files."""
SHELL = re.compile(
    r"allranks |make |git |source |python |srun |sbatch |mpirun |mpiexec |pip |openssl |export |for |done|cd "
    r"|torchrun |taskset |vllm |docker |conda |(\.\./base/)?\.venv/bin/|\.\./base/"
)


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each block. An indented block has no language."""
    text = (ROOT / page).read_text()
    for language, block in FENCE.findall(text):
        if not language.startswith("{"):  # Sphinx directives are no code blocks
            yield language, block
    for block in INDENTED.findall(re.sub(FENCE, "", text)):
        plain = re.sub(r"^    ", "", block.lstrip("\n"), flags=re.MULTILINE)
        if plain.strip() and not re.match(r"\s*[-*|] ", plain):
            yield "", plain


def commands(block: str) -> list[str]:
    """Return the lines of a block that a shell runs, without comments and without variables before the command."""
    lines = block.replace("\\\n", " ").splitlines()
    plain = [re.sub(r"(^|\s)#.*", "", re.sub(r"^(?:\w+=\S* )+", "", line.strip())).strip() for line in lines]
    return [line for line in plain if line]


def is_shell(block: str) -> bool:
    return all(SHELL.match(line) or OUTPUT.match(line) for line in commands(block))
