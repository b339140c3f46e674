"""Our form for programs that cannot be given a ``StorageWriter``: they name torch's classes, or a path only.

Lightning and Accelerate call ``torch.distributed.checkpoint`` themselves, without a place for a writer of the user's.
What they name is looked up when they save. So the names are replaced for a while, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as torchs
from torch.distributed.checkpoint import filesystem

from allranks._base.errors import UsageError
from allranks.checkpoint import folders, saving
from allranks.checkpoint.dcp import StorageReader, StorageWriter

__all__ = ["as_default"]

_NAMES = ("FileSystemWriter", "FileSystemReader")
_HOW = {"single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"}
"""Arguments of torch's writer that tell how files are written, not what is in them."""


@contextlib.contextmanager
def as_default(*, step: int = 0) -> Iterator[None]:
    """Inside the block, torch's distributed checkpoint writes and reads our form by default.

    ::

        with checkpoint.as_default():
            trainer.fit(model)  # Lightning, with ModelParallelStrategy

    It is for programs that name ``torch.distributed.checkpoint.FileSystemWriter`` and ``FileSystemReader``, or only a
    path, and take no writer: Lightning, Accelerate. Each path becomes a folder of checkpoints with one of step
    ``step``. Another save to the same path replaces it when it is complete. Checkpoints of torch's form are still read.

    The names are replaced in ``torch.distributed.checkpoint``, for all threads of the process. A program that has
    imported the classes themselves keeps torch's. All ranks enter and leave the block.

    Args:
        step: the name of the checkpoints; programs have their step in the path.

    Raises:
        UsageError: this version of torch looks them up elsewhere. While saving: an argument of the writer that our form
            has nothing for.
    """
    saving.check_numbers("checkpoint.as_default", step, None, None)
    replaced = {"FileSystemWriter": _writer_of(step), "FileSystemReader": _PathReader}
    modules = _modules()
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, ours in replaced.items():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, ours)
        yield


def _modules() -> list[ModuleType]:
    """Where torch looks the names up: those that programs import, and those for a path only."""
    importlib.import_module(f"{torchs.__name__}.format_utils")  # it keeps what it finds when it is imported
    where = f"{torchs.__name__}._storage_utils"
    try:
        modules = [torchs, importlib.import_module(where)]
    except ModuleNotFoundError:
        raise UsageError(f"checkpoint.as_default: torch {torch.__version__} has no {where}") from None
    for module in modules:
        for name in _NAMES:
            if not hasattr(module, name):
                raise UsageError(f"checkpoint.as_default: torch {torch.__version__} has no {module.__name__}.{name}")
    return modules


def _writer_of(default_step: int) -> type[StorageWriter]:
    class PathWriter(StorageWriter):
        """Takes the arguments of torch's FileSystemWriter."""

        def __init__(self, path: folders.PathLike, *how: Any, overwrite: bool = True, **more: Any) -> None:
            if unknown := [name for name in more if name not in _HOW] + (["overwrite=False"] if not overwrite else []):
                raise UsageError(f"checkpoint.as_default: FileSystemWriter(..., {unknown[0]}) is not possible here")
            super().__init__(path, step=default_step)

    return PathWriter


class _PathReader(StorageReader):
    """Takes the arguments of torch's FileSystemReader."""

    def __new__(cls, path: folders.PathLike, *more: Any, **named: Any) -> Any:
        if (Path(path) / ".metadata").exists():  # torch's form
            return filesystem.FileSystemReader(path, *more, **named)
        return super().__new__(cls)

    def __init__(self, path: folders.PathLike, *more: Any, **named: Any) -> None:
        super().__init__(path)
