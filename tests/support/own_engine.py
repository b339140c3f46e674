"""The engine package that docs/extending.md shows, installed with pip, and variants of it."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def file_of_page(name: str) -> str:
    """Return a file that the page shows: the code block that begins with the file's name."""
    (text,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text)


def installed(folder: Path) -> Path:
    """Install the page's package with pip, and return the target folder."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "allranks_mine.py"):
        (source / name).write_text(file_of_page(name))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", site, source], check=True)
    return site


def brought(site: Path, module: str, text: str, *entry_points: str, version: str = "1.0") -> None:
    """Write a package with one module into the folder, in the layout that pip creates."""
    about = site / f"{module}-{version}.dist-info"
    about.mkdir(parents=True)
    (site / f"{module}.py").write_text(text)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("\n".join(["[allranks.engines]", *entry_points, ""]))
