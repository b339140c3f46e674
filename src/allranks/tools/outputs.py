"""Check before a measurement whether the report and the picture can be written."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

__all__ = ["output_problem"]


def output_problem(report: Path | None, picture: Path | None) -> str:
    """Return why a file cannot be written; "" if all files can be written.

    Args:
        report: The JSON file; ``-`` is stdout.
        picture: The picture file. matplotlib draws it, in the format of the file name extension.
    """
    for file in (report, picture):
        if file is None or str(file) == "-":
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            return f"no such directory: {folder}"
        if file.is_dir():
            return f"{file} is a directory"
        if not os.access(file if file.exists() else folder, os.W_OK):
            return f"cannot write to {file}: no permission, or a read-only file system"
    if picture is None:
        return ""
    if not importlib.util.find_spec("matplotlib"):
        return "--plot requires matplotlib.\n  Run `pip install matplotlib`."
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if (ending := picture.suffix.removeprefix(".").lower() or "png") not in known:
        return f"--plot {picture}: unknown picture format {ending!r}; expected one of {', '.join(sorted(known))}"
    return ""
