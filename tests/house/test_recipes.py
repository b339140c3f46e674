"""The recipes of docs/recipes.md and the code blocks of the FAQ run."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from support import warm

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/recipes"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def launch(folder: Path, *words: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "allranks", "run", "-n", str(ranks), *words]
    done = warm.run(command, cwd=folder, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_code_blocks_of_the_faq_run(ranks: int, tmp_path: Path) -> None:
    """All blocks run in one program, after the first block."""
    first, *others = BLOCK.findall((ROOT / "docs/faq.md").read_text())
    blocks = [block for block in others if not block.startswith("# notebook")]
    assert len(blocks) >= 12
    indented = ["if True:\n" + re.sub(r"^(?=.)", "    ", block, flags=re.MULTILINE) for block in blocks]
    (tmp_path / "faq.py").write_text("\n".join([first, *indented, "print(f'end {rank}')\n"]))
    output = launch(tmp_path, "faq.py", ranks=ranks)
    assert sorted(re.findall(r"end (\d)", output)) == [str(rank) for rank in range(ranks)]


def test_faq_has_at_least_twenty_questions() -> None:
    assert len(re.findall(r"^### ", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)) >= 20


def test_notebook_block_of_the_faq_runs(tmp_path: Path) -> None:
    (block,) = (b for b in BLOCK.findall((ROOT / "docs/faq.md").read_text()) if b.startswith("# notebook"))
    (tmp_path / "notebook.py").write_text(block)
    done = warm.run([sys.executable, "notebook.py"], cwd=tmp_path, timeout=110)
    assert (done.returncode, done.stdout) == (0, "[10, 11]\n"), done.stderr


def test_tracker_writes_each_value_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    launch(tmp_path, str(RECIPES / "tracker.py"), "runs")
    (file,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(file)).Reload().Scalars("loss")
    assert [event.step for event in events] == [0, 10, 20, 30, 40]
    assert events[-1].value < events[0].value


def test_container_installs_what_the_readme_lists() -> None:
    """Check the files of the image, because Docker cannot run here.

    The image has the packages of the README's command, and pip installs the repository.
    """
    text = (RECIPES / "Dockerfile").read_text()
    needed = re.search(r"`apt-get install ([^`]*)`", (ROOT / "README.md").read_text())
    assert needed
    tools = {name for name in needed[1].split() if not name.startswith("python3")}
    assert tools <= set(text.split())
    assert "pip install '.[examples]'" in text
    environment = yaml.safe_load((RECIPES / "environment.yml").read_text())
    (pip,) = (each["pip"] for each in environment["dependencies"] if isinstance(each, dict))
    assert (RECIPES / pip[0] / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
