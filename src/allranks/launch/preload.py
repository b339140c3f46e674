"""Imports torch into the process that ranks are forked from: once for all of them.

By name, and in no other module: the launcher starts without torch, and works where torch is broken.
"""

from __future__ import annotations

import gc
import importlib
import os

__all__ = ["preload"]


def preload(threads: str) -> bool:
    """Imports torch into this process, which ranks are then forked from.

    Args:
        threads: threads per rank, which torch's libraries read when they are loaded.

    Returns:
        False if torch cannot be imported: then a fresh interpreter should meet the error, and show it if the
        program needs torch at all.
    """
    os.environ["OMP_NUM_THREADS"] = threads
    gc.disable()  # with freeze: collections in the ranks leave the pages shared
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):
        return False
    gc.freeze()
    return True
