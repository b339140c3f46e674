"""allranks's format for programs that do not accept a ``StorageWriter``: they name torch's classes, or only a path.

Lightning and Accelerate call ``torch.distributed.checkpoint`` themselves, and the user cannot pass a writer. They look
up the classes when they save, so it is sufficient to replace these names for the duration of a block.
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
"""Arguments of torch's writer that affect how files are written, but not their contents."""


@contextlib.contextmanager
def as_default(*, step: int = 0) -> Iterator[None]:
    """Use allranks's format as the default of torch's distributed checkpoint inside the block.

    ::

        with checkpoint.as_default():
            trainer.fit(model)  # Lightning, with ModelParallelStrategy

    It is for programs that name ``torch.distributed.checkpoint.FileSystemWriter`` and ``FileSystemReader``, or only a
    path, and accept no writer: Lightning, Accelerate. Each path becomes a folder of checkpoints with one checkpoint, of
    step ``step``. Another save to the same path replaces it when the new checkpoint is complete. Checkpoints in torch's
    format can still be read.

    The names are replaced in ``torch.distributed.checkpoint``, for all threads of the process. A program that has
    imported the classes themselves continues to use torch's. All ranks enter and leave the block.

    Args:
        step: The name of the checkpoints. Programs usually have their step in the path.

    Raises:
        UsageError: This version of torch looks the names up elsewhere. While saving: the format does not support an
            argument of the writer.
    """
    saving.check_numbers("checkpoint.as_default", step, None, None)
    replaced = {"FileSystemWriter": _writer_of(step), "FileSystemReader": _PathReader}
    modules = _modules()
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, ours in replaced.items():
                # Registered before the replacement, so that an error in between restores the name, too.
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, ours)
        yield


def _modules() -> list[ModuleType]:
    """Return the modules in which torch looks up the names, for callers that name a class or only a path."""
    # format_utils binds the names when it is imported, so import it before they are replaced.
    importlib.import_module(f"{torchs.__name__}.format_utils")
    where = f"{torchs.__name__}._storage_utils"
    try:
        modules = [torchs, importlib.import_module(where)]
    except ModuleNotFoundError:
        raise _unsupported_torch(where) from None
    for module in modules:
        for name in _NAMES:
            if not hasattr(module, name):
                raise _unsupported_torch(f"{module.__name__}.{name}")
    return modules


def _unsupported_torch(missing: str) -> UsageError:
    return UsageError(
        f"checkpoint.as_default: torch {torch.__version__} has no {missing}.\n"
        "  Pass checkpoint.StorageWriter and checkpoint.StorageReader to torch's save and load."
    )


def _writer_of(default_step: int) -> type[StorageWriter]:
    class PathWriter(StorageWriter):
        """Accepts the arguments of torch's FileSystemWriter."""

        def __init__(self, path: folders.PathLike, *how: Any, overwrite: bool = True, **more: Any) -> None:
            if unknown := [name for name in more if name not in _HOW] + (["overwrite=False"] if not overwrite else []):
                raise UsageError(
                    f"checkpoint.as_default: FileSystemWriter(..., {unknown[0]}) is not supported.\n"
                    "  Remove this argument, or call torch's function outside of as_default."
                )
            super().__init__(path, step=default_step)

    return PathWriter


class _PathReader(StorageReader):
    """Accepts the arguments of torch's FileSystemReader."""

    def __new__(cls, path: folders.PathLike, *more: Any, **named: Any) -> Any:
        if (Path(path) / ".metadata").exists():  # torch's format
            return filesystem.FileSystemReader(path, *more, **named)
        return super().__new__(cls)

    def __init__(self, path: folders.PathLike, *more: Any, **named: Any) -> None:
        super().__init__(path)
