"""Run the programs, commands and docstring examples that the documents show."""

import ast
import doctest
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allranks
from allranks.testing import run_ranks
from support import warm

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "allranks"
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text()
)
# If PYTHONUNBUFFERED is set, the output of ranks is interleaved within lines.
_OTHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in _OTHERS}


def page_program(name: str, *pages: str) -> str:
    """Return the program with this name from these pages; by default from the README or docs/launching.md."""
    for page in pages or ("README.md", "docs/launching.md"):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            if block.startswith(f"# {name}\n"):
                return block
    raise AssertionError(f"no page contains the program {name}")


class Written(doctest.DocTestFinder):
    """Finder that finds public classes and functions in their defining module.

    Their ``__module__`` is the public package, so the standard finder skips them.
    """

    def _from_module(self, module: object, object: object) -> bool:
        name, written = getattr(object, "__name__", ""), getattr(object, "__module__", None) or ""
        return super()._from_module(module, object) or (name in allranks.__all__ and written.startswith("allranks"))


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_docstring_examples_print_what_they_show(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE"):
        monkeypatch.delenv(name, raising=False)
    found = examples(module)
    assert found
    for test in found:
        if not is_of_ranks(test):
            assert doctest.DocTestRunner().run(test).failed == 0

    def body() -> None:
        for test in filter(is_of_ranks, examples(module)):
            test.globs.update(torch=torch, dist=allranks)
            runner = doctest.DocTestRunner(Anything() if allranks.get_rank() > 0 else None)
            assert runner.run(test).failed == 0, test.name

    if any(map(is_of_ranks, found)):
        run_ranks(2, body)


def examples(module: str) -> list[doctest.DocTest]:
    """Return the docstrings of a module that contain examples."""
    return [test for test in Written().find(importlib.import_module(module)) if test.examples]


def is_of_ranks(test: doctest.DocTest) -> bool:
    """Return whether each of 2 ranks runs the example. Such examples do not import and do not destroy the world."""
    words = "".join(example.source for example in test.examples)
    return "dist." in words and "import " not in words


class Anything(doctest.OutputChecker):
    """Checker for ranks other than 0: it accepts any output, because an example shows the output of rank 0."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_program_on_page_runs_with_the_launcher(tmp_path: Path, page: str) -> None:
    (tmp_path / "hello.py").write_text(page_program("hello.py", page))
    done = warm.run(
        [sys.executable, "-m", "allranks", "run", "-n", "2", "hello.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2: [3.0, 3.0, 3.0]",
        "[1] rank 1 of 2: [3.0, 3.0, 3.0]",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("master", ["apart", "together"])
def test_program_runs_with_manually_set_variables(tmp_path: Path, master: str) -> None:
    (tmp_path / "hello.py").write_text(page_program("hello.py"))
    port = 29400 + os.getpid() % 1000
    where = (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if master == "apart"
        else {"MASTER_ADDR": f"127.0.0.1:{port}"}
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "hello.py"],
            cwd=tmp_path,
            env={**ENVIRONMENT, "WORLD_SIZE": "2", "RANK": str(rank), "XDG_CONFIG_HOME": str(tmp_path), **where},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert outputs == [f"rank {r} of 2: [3.0, 3.0, 3.0]\n" for r in range(2)]


def test_programs_that_start_ranks_from_python(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text(page_program("called.py"))
    called = warm.run([sys.executable, "called.py"], cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert (called.stdout, called.stderr) == ("[21, 21]\n", "")
    (tmp_path / "spawned.py").write_text(page_program("spawned.py"))
    done = warm.run([sys.executable, "spawned.py"], cwd=tmp_path, env=ENVIRONMENT, check=True)
    # Without a launcher the lines of the two processes can be interleaved, so count occurrences.
    assert done.stdout.count("rank 0 of 2") == done.stdout.count("rank 1 of 2") == 1


def test_program_that_starts_workers(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(page_program("workers.py"))
    alone = [sys.executable, "workers.py"]
    done = warm.run(alone, cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert re.fullmatch(r"\d+ on worker:2\n", done.stdout)
    assert done.stderr == ""


def test_commands_of_the_tracing_page_succeed(tmp_path: Path) -> None:
    """Run the commands of docs/tracing.md in the order of the page."""
    (tmp_path / "train.py").write_text(page_program("hello.py"))
    text = (ROOT / "docs" / "tracing.md").read_text()
    lines = re.findall(r"^    (allranks .*(?:--trace|trace [a-qt-z]|trace record).*)$", text, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line.replace(" --profiler profile-*.json", ""))
        warm.run([sys.executable, "-m", *words], cwd=tmp_path, env=ENVIRONMENT, check=True)


def test_figures_match_the_benchmark_results() -> None:
    subprocess.run([sys.executable, "benchmarks/figures.py", "--check"], cwd=ROOT, check=True)


def test_readme_has_at_most_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def slug(title: str) -> str:
    """Return the anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# The index page of the site, which is one folder higher there. test_site.py checks its links.
INDEX = ROOT / "docs/index.md"
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")} - {INDEX})


@functools.cache
def files_of_the_site() -> set[Path]:
    # docs/site.py imports Sphinx, which the environment of the tests does not have.
    tree = ast.parse((ROOT / "docs/site.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    files = {path for pattern in ast.literal_eval(assigned["TAKEN"]) for path in ROOT.glob(pattern)}
    return files | {folder for file in files for folder in file.parents}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_have_existing_targets(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        led = (page.parent / target).resolve() if target else page
        assert led.exists(), link
        assert led in files_of_the_site() or page not in files_of_the_site(), f"docs/site.py does not copy {link}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", led.read_text(), re.MULTILINE)
            assert anchor in map(slug, titles), link
