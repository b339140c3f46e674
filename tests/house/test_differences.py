"""docs/differences.md contains the tables of all exceptions that the conformance tests allow.

python tests/house/test_differences.py --write      # after a change of these tables
"""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "differences.md"
MARK = "<!-- From here on written by tests/house/test_differences.py -->\n"


def table(head: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {head} | Why |", "|---|---|", *(f"| `{name}` | {reason} |" for name, reason in rows.items())]
    return "\n".join(lines) + "\n"


def tables() -> str:
    sys.path[:0] = [str(ROOT / "tests" / "conformance"), str(ROOT / "tests")]
    import test_bad_input
    import test_signatures
    import torch_suite

    arguments = {
        f"{name}({parameter}=)": reason
        for name, parameters in test_signatures.DIFFERENT.items()
        for parameter, reason in parameters.items()
    }
    methods: dict[str, str] = {}
    for cls, missing in test_signatures.MISSING_METHODS.items():
        for reason in dict.fromkeys(missing.values()):
            names = ", ".join(name for name in missing if missing[name] == reason)
            methods[f"{cls}: {names}"] = reason
    excluded = {pattern.strip("^$"): reason for pattern, reason in torch_suite.EXCLUDED.items()}
    return "\n".join(
        [
            "## Public names of torch.distributed that allranks lacks\n",
            table("Name", dict(sorted(test_signatures.MISSING.items()))),
            "## Public methods that allranks lacks\n",
            table("Method", methods),
            "## Arguments\n",
            table("Argument", arguments),
            "## Exceptions of a different type\n",
            table("Call", test_bad_input.DIFFERENT),
            "## Tests of torch's own suite that pass only on gloo\n",
            table("Test", excluded),
        ]
    )


def test_differences_page_contains_the_current_tables() -> None:
    assert PAGE.read_text().partition(MARK)[2] == tables(), "run: python tests/house/test_differences.py --write"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables())
