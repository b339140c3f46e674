"""docs/engines.md lists the reductions that each engine supports.

python tests/house/test_engines.py --write      # after a change of these reductions
"""

import sys
from pathlib import Path

import torch

from allranks import ReduceOp, _core
from allranks._engines import registry

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
MARK = "<!-- From here on written by tests/house/test_engines.py -->\n"
OPS = [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]


def ops(engine: str, dtype: torch.dtype, name: str) -> str:
    from allranks._engines.c10d import engine as c10d
    from allranks._engines.mpi import engine as mpi  # This import does not need an MPI library.

    if engine in ("native", "tcp"):
        known = [op.name for op in OPS if _core.reduces(_core.DTYPES[name], op)]
    elif engine == "mpi":
        known = [op.name for op in OPS if mpi.reduces(dtype, op)]
    else:
        known = [op.name for op in OPS if c10d.reduces(engine, dtype, op)]
    return ", ".join(known) if known else "none"


def table() -> str:
    lines = [
        "## What is reduced\n",
        f"| | {' | '.join(f'`{engine}`' for engine in registry.BUILT_IN)} |",
        "|---|" + "---|" * len(registry.BUILT_IN),
    ]
    rows: dict[str, list[str]] = {}
    for name in _core.DTYPES:
        if hasattr(torch, name):
            cells = " | ".join(ops(engine, getattr(torch, name), name) for engine in registry.BUILT_IN)
            rows.setdefault(cells, []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    lines.append("\n`premul_sum` is available for the dtypes of SUM.")
    return "\n".join(lines) + "\n"


def test_engines_page_contains_the_current_table() -> None:
    assert PAGE.read_text().partition(MARK)[2] == table(), "run: python tests/house/test_engines.py --write"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + table())
