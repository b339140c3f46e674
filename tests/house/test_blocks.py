"""Every code block of the documents has a test that runs it or runs the program that contains it.

test_commands_of_pages.py runs the commands that need no other hosts, no scheduler and little time. Here the parser of
each command reads it, so that no document contains an unknown option.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from allranks._base.console import collecting_help
from allranks.launch.arguments.options import parse
from allranks.tools.commands import COMMANDS
from support.pages import OUTPUT, ROOT, blocks, commands, is_shell

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
PYTHON = {
    "README.md": "house/test_docs.py",
    "docs/index.md": "house/test_docs.py",
    "docs/start.md": "house/test_guides.py",
    "docs/process_groups.md": "house/test_guides.py",
    "docs/training.md": "house/test_guides.py",
    "docs/tuning.md": "house/test_guides.py",
    "docs/thd.md": "house/test_guides.py",
    "docs/moving.md": "house/test_moving.py",
    "docs/master_worker.md": "house/test_master_worker_page.py",
    "docs/faq.md": "house/test_recipes.py",
    "docs/torch.md": "house/test_fragments.py",
    "docs/security.md": "house/test_fragments.py",
    "docs/launching.md": "house/test_docs.py",
    "docs/resilience.md": "house/test_fragments.py",
    "docs/checkpoints.md": "house/test_fragments.py",
    "docs/extending.md": "conformance/test_own_engine.py",
}
"""The test that runs the Python blocks of a page, except the blocks in OTHERS."""

OTHERS = {
    # page, beginning of a block: the test that runs it
    ("docs/launching.md", "import allranks\n"): "launch/test_call.py",
    ("docs/launching.md", "  for batch in (loop := allranks.progress"): "launch/test_call.py",
    ("docs/launching.md", "import allranks as dist\nimport allranks.logging"): "house/test_fragments.py",
    ("docs/launching.md", "store = dist.TCPStore"): "house/test_fragments.py",
    ("docs/resilience.md", "try:\n"): "faults/test_survival.py",
    ("docs/resilience.md", "state = dist.resilience.State(model=model"): "resilience/",
    ("docs/resilience.md", "state = dist.resilience.State(\n"): "resilience/",
    ("docs/checkpoints.md", "with checkpoint.as_default"): "checkpoint/test_dcp.py",
    ("docs/security.md", "openssl req"): "store/",
    ("docs/torch.md", "torch.distributed.init_process_group"): "api/test_reconfigure.py",
    ("docs/torch.md", "dist.init_process_group()  # the world"): "plugin/",
    ("docs/tracing.md", "with dist.trace.record"): "trace/",
    ("docs/hangs.md", "# hang.py"): "watch/test_guide.py",
    ("docs/moving.md", " # layer.py"): "house/test_moving.py",
    ("docs/serve_on_cpus.md", "from transformers import"): "plugin/test_transformers.py",
    ("docs/extending.md", "# pyproject.toml"): "conformance/",
    ("docs/extending.md", "from allranks.schedulers"): "hosts/test_own_scheduler.py",
    ("docs/extending.md", "[project.entry-points"): "hosts/test_own_scheduler.py",
    ("docs/extending.md", "// all_reduce of up to"): "house/test_algorithms.py",
    ("docs/extending.md", "ROW(all_reduce"): "house/test_algorithms.py",
    ("docs/extending.md", "def load(worker"): "remote/",
    ("docs/extending.md", 'allranks.init_process_group("mine")'): "engines/",
    ("README.md", "state = dist.resilience.State(model=model"): "resilience/",
    ("README.md", 'torch.distributed.init_process_group("allranks")'): "plugin/",
}


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_names_the_test_that_runs_it(page: str) -> None:
    unknown = []
    for language, block in blocks(page):
        listed = any(page == where and block.startswith(start) for where, start in OTHERS)
        shown = language == "text" or OUTPUT.match(block.lstrip()) is not None
        known = language == "python" and page in PYTHON
        if not (listed or shown or known or (language in ("", "bash") and is_shell(block))):
            unknown.append(block[:60])
    assert unknown == [], "add the test that runs each of these blocks to this file"


def test_named_tests_and_blocks_exist() -> None:
    named = {*PYTHON.values(), *OTHERS.values()}
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
    gone = [key for key in OTHERS if not any(block.startswith(key[1]) for _, block in blocks(key[0]))]
    assert gone == []


def calls() -> list[str]:
    """Return the arguments of every `allranks` command on all pages."""
    found = set()
    for page in PAGES:
        for language, block in blocks(page):
            if language in ("", "bash"):
                for line in commands(block):
                    call = re.match(r"(?:srun [^a]*|\S*\.venv/bin/)?allranks (.*)", line)
                    if call and not line.startswith("allranks run:"):
                        found.add(re.split(r" [<>|&] ?", call[1])[0])
    return sorted(found)


@pytest.mark.parametrize("line", calls())
def test_documented_command_is_valid(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node0 slots=4\nnode1 slots=4\n")
    # The package that provides the backend "mine" is not installed.
    name, *words = shlex.split(line.replace("--backend mine", "--backend native"))
    assert name in COMMANDS
    if name == "run" and "--help" not in words:
        assert parse(words).target.name
    else:
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        with collecting_help() as shown:
            help_words = [word for word in words[:1] if name in ("trace", "checkpoint")]
            with pytest.raises(SystemExit):
                importlib.import_module(COMMANDS[name][0]).main([*help_words, "--help"])
        known = {option for parser in shown for action in parser._actions for option in action.option_strings}
        assert options <= known or "--" in words or name in ("submit", "torchrun", "launch")
