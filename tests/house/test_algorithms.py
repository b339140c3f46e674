"""Each algorithm of the core needs one file and one table row, and the example in docs/extending.md compiles."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
FOLDER = CORE / "collective" / "algorithms"
TABLE = (FOLDER / "table.h").read_text()
ROW = re.compile(r"^ +ROW\((\w+), (\w+), (\w+)\)", re.MULTILINE)


def test_each_table_row_names_a_function_in_the_algorithms_folder() -> None:
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.cc")}
    used = set()
    assert ROW.findall(TABLE)
    for _, function, condition in ROW.findall(TABLE):
        for name in {function, condition} - {"always"}:
            define = re.compile(rf"^(void|bool) {name}\((const )?LocalComm& comm, [^)]*const Operation&", re.MULTILINE)
            homes = [file for file, text in sources.items() if define.search(text)]
            assert len(homes) == 1, (name, homes)
            used.add(homes[0])
    assert used == set(sources), "a file has no row in the table"


def test_only_the_table_lists_algorithms() -> None:
    names = "|".join({path.stem for path in FOLDER.glob("*.cc")} | {row[1] for row in ROW.findall(TABLE)})
    build = (ROOT / "CMakeLists.txt").read_text()
    assert not re.search(rf"algorithms/({names})\.cc", build)
    assert not re.search(rf"algorithms::({names})\b", (CORE / "group" / "comm.cc").read_text())


def test_example_in_extending_md_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text().partition("\n## An algorithm\n")[2].partition("\n## ")[0]
    source, row = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    changed = tmp_path / "collective" / "algorithms"
    shutil.copytree(FOLDER, changed)
    first = ROW.search(TABLE)
    assert first is not None
    (changed / "table.h").write_text(TABLE[: first.start()] + f"  {row.strip()} \\\n" + TABLE[first.start() :])
    (changed / "mine.cc").write_text(source)
    (tmp_path / "takes.cc").write_text(
        """#include "collective/algorithms/table.h"
        using namespace allranks::algorithms;
        static_assert(kAlgorithms[0].run == all_reduce_pair && kAlgorithms[0].applies == is_small_pair);
        """
    )
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    for path in (changed / "mine.cc", tmp_path / "takes.cc"):
        subprocess.run(
            [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers",
             f"-I{tmp_path}", f"-I{CORE}", str(path)], check=True,
        )  # fmt: skip
