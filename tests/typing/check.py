"""Check typical user programs with mypy and pyright: ``python tests/typing/check.py``.

The programs are those in this folder, the README, docs/launching.md and ``examples/first``. The other examples use
packages without types. If a line contains ``# expect:``, each checker must report one of the errors listed after it,
and no other error. pyright is installed as basedpyright, whose package is complete.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "typing"
_UNTYPED = ("no-untyped-def", "no-untyped-call")  # users do not have to annotate functions; torch does not do so either


def programs() -> dict[Path, Path]:
    """Copy all programs to one folder, under unique names as mypy requires; return the source of each copy."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    copies = {}
    for page in ("README.md", "docs/launching.md"):
        for block, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (ROOT / page).read_text(), re.DOTALL):
            (BUILD / f"page_{name}").write_text(block)
            copies[BUILD / f"page_{name}"] = ROOT / f"{page} ({name})"
    for path in (*(ROOT / "tests" / "typing").glob("*.py"), *(ROOT / "examples" / "first").glob("*.py")):
        if path != Path(__file__):
            copy = BUILD / "_".join(path.relative_to(ROOT).parts)
            shutil.copyfile(path, copy)
            copies[copy] = path
    return copies


def expected(paths: Iterable[Path]) -> dict[tuple[Path, int], list[str]]:
    """Return the codes of the errors that are expected, by file and line number."""
    return {
        (path, number): line.partition("# expect:")[2].split()
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# expect:" in line
    }


def by_mypy(paths: Iterable[Path]) -> Iterator[tuple[Path, int, str, str]]:
    """Yield the errors of mypy, with the strict settings and the cache of `make check`."""
    command = [sys.executable, "-m", "mypy", "--output", "json", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"mypy failed: {done.stdout}{done.stderr}")
    for line in done.stdout.splitlines():
        found = json.loads(line) if line.startswith("{") else {}
        if found.get("severity") == "error" and found["code"] not in _UNTYPED:
            yield ROOT / found["file"], found["line"], found["code"], found["message"]


def by_pyright(paths: Collection[Path]) -> Iterator[tuple[Path, int, str, str]]:
    """Yield the errors of pyright in its standard mode."""
    settings = BUILD / "pyrightconfig.json"
    settings.write_text(json.dumps({"typeCheckingMode": "standard", "include": [str(path) for path in paths]}))
    command = [str(Path(sys.executable).parent / "basedpyright"), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", str(settings)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"basedpyright failed: {done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    if report["summary"]["filesAnalyzed"] != len(paths):
        sys.exit(f"basedpyright checked {report['summary']['filesAnalyzed']} files of {len(paths)}")
    for found in report["generalDiagnostics"]:
        if found["severity"] == "error":
            line = found["range"]["start"]["line"] + 1
            yield Path(found["file"]).resolve(), line, found.get("rule", "?"), found["message"]


def main() -> int:
    """Print all unexpected and missing errors; return 1 if there are any, otherwise 0."""
    paths = programs()
    wanted = expected(paths)
    wrong = 0
    for checker, reported in (("mypy", by_mypy(paths)), ("pyright", by_pyright(paths))):
        seen = set()
        for path, line, code, message in reported:
            if code in wanted.get((path, line), ()):
                seen.add((path, line))
            else:
                wrong += 1
                print(f"{paths[path].relative_to(ROOT)}:{line}: {checker}: {message} [{code}]")
        for path, line in sorted(wanted.keys() - seen):
            wrong += 1
            print(f"{paths[path].relative_to(ROOT)}:{line}: {checker}: expected one of {' '.join(wanted[path, line])}")
    print(f"{len(paths)} programs under mypy and pyright: {wrong} lines differ from the expected errors")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
