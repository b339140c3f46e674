"""Write the type stub of the package: its public names, from the table in allranks/__init__.py.

    python tests/house/stub.py    # writes src/allranks/__init__.pyi; `make format` does

Type checkers and editors read the stub. test_exports.py compares it with the table.
"""

from __future__ import annotations

from pathlib import Path

import allranks

STUB = Path(__file__).parents[2] / "src" / "allranks" / "__init__.pyi"


def stub() -> str:
    """Return the text of the stub."""
    homes = [(home, name) for name, home in allranks._TORCHS.items()]
    homes += [("torch.distributed", name) for name in allranks._TORCHS_MODULES]
    ours = [("allranks", name) for name in allranks._MODULES]
    ours += [(f"allranks.{home}", name) for home, names in allranks._HOME.items() for name in names]
    head = "# Written by `make format` from the table of names in __init__.py."
    lines = [head, *_imports(homes), "", *_imports(ours)]
    return "\n".join([*lines, "", "__version__: str", "__all__: list[str]", ""])


def _imports(names: list[tuple[str, str]]) -> list[str]:
    return [f"from {home} import {name} as {name}" for home, name in sorted(names)]


if __name__ == "__main__":
    STUB.write_text(stub())
