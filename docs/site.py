"""Build the site: collect the pages, generate the pages that follow from the code, and run Sphinx.

    python docs/site.py build/site

The result is static files that any web server can serve and a browser can open from a disk. Warnings are errors.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

import allranks
from allranks._cluster.env import VARIABLES
from allranks.tools.completion.tree import collect as collect_commands

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/site-source"
# Sources of the pages, and the files that they link to.
MASTERS = ("allranks.remote.master.master.Master", "allranks.remote.master.groups.Group")
TAKEN = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/*.svg", "docs/decisions/*.md",
    "examples/**/*.md", "examples/**/*.py", "examples/**/*.sh", "examples/**/*.yaml", "examples/**/*.ipynb",
    "benchmarks/*.png", "benchmarks/*.json",
    "tests/support/README.md", "src/allranks/_elastic/README.md", ".devcontainer/devcontainer.json",
    "examples/recipes/*", "core/collective/algorithms/table.h",
    "src/allranks/_rendezvous/finders/interface.py", "src/allranks/_cluster/schedulers/interface.py",
)  # fmt: skip
MODULES = {
    "allranks.nn.functional": "Collectives with gradients",
    "allranks.algorithms.ddp_comm_hooks.default_hooks": "Communication hooks",
    "allranks.logging": "Log files",
    "allranks.multiprocessing": "Processes without a launcher",
    "allranks.resilience": "Failures and resilience",
    "allranks.checkpoint": "Checkpoints",
    "allranks.trace": "Traces",
    "allranks.testing": "Tests of programs with ranks",
    "allranks.engines": "Engines of one's own",
    "allranks.schedulers": "Schedulers of one's own",
}


def collect() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in TAKEN:
        for path in ROOT.glob(pattern):
            target = SOURCE / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.move(SOURCE / "docs/index.md", SOURCE / "index.md")
    with (SOURCE / "docs/decisions.md").open("a") as page:
        page.write("\n```{toctree}\n:hidden:\n:glob:\n\ndecisions/*\n```\n")


def rst(*lines: str) -> str:
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def commands() -> list[str]:
    """Return the output of ``--help`` of each command."""
    return [
        f"## allranks {command.name}\n\n```text\n{command.parser.format_help()}```\n"
        for one in collect_commands()
        for command in one.walk()
    ]


def reference() -> None:
    """Write a page for each kind of public name."""
    folder = SOURCE / "docs/reference"
    folder.mkdir()
    functions, classes, errors = [], [], []
    for name in sorted(allranks.__all__):
        value = getattr(allranks, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            errors.append(name)
        elif inspect.isclass(value):
            classes.append(name)
        elif callable(value):
            functions.append(name)
    pages = {
        "functions": ("Functions", [rst(f".. autofunction:: allranks.{name}") for name in functions]),
        "classes": ("Classes", [rst(f".. autoclass:: allranks.{name}", "   :members:") for name in classes]),
        "errors": ("Errors", [rst(f".. autoexception:: allranks.{name}") for name in errors]),
    }
    for module, title in MODULES.items():
        pages[module.partition(".")[2].replace(".", "_")] = (
            title,
            [rst(f".. automodule:: {module}", "   :members:", "   :exclude-members: CheckpointError, ConfigError")],
        )
    pages["master"] = ("Master-worker objects", [rst(f".. autoclass:: {name}", "   :members:") for name in MASTERS])
    pages["commands"] = ("Commands", commands())
    for page, (title, parts) in pages.items():
        (folder / f"{page}.md").write_text(f"# {title}\n\n" + "\n".join(parts))
    toctree = "\n".join(["```{toctree}", ":hidden:", *pages, "```"])
    listed = "\n".join(f"- [{title}]({page}.md)" for page, (title, _) in pages.items())
    (folder / "index.md").write_text(
        f"# Reference\n\nFrom the docstrings. `import allranks as dist`.\n\n{listed}\n\n{toctree}\n"
    )


def environment() -> None:
    """Write the table of environment variables."""
    rows = [
        f"| `{each.name}` | {each.set_by} | {each.meaning} | {each.default or ''} |"
        for each in VARIABLES
        if each.default is not None
    ]
    text = "# Environment variables\n\n| name | set by | meaning | default |\n|---|---|---|---|\n" + "\n".join(rows)
    (SOURCE / "docs/environment.md").write_text(text + "\n")


def main(target: str) -> int:
    shutil.rmtree(target, ignore_errors=True)
    os.environ["COLUMNS"] = "80"  # width of the commands' help
    collect()
    reference()
    environment()
    return sphinx(["-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), str(SOURCE), target])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
