"""Imports torch into the process that ranks are forked from: once for all of them.

By name, and in no other module: the launcher starts without torch, and works where torch is broken.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping

from allranks.launch.ranks.imports import Imports, read_imports
from allranks.launch.spec.target import Target

__all__ = ["preload", "preload_for_elastic_ranks"]

_OF_WORKERS = (
    "allranks.remote.bootstrap.worker_context",
    "allranks.remote.worker.interpreter",
    "allranks._engines.native.engine",
)

# What ranks need from ``import allranks`` to their first collective: a quarter of a second.
_OF_RANKS = ("allranks._api.world", "allranks._engines.native.engine")

# And what the ranks of an elastic job need besides.
_OF_ELASTIC_RANKS = ("allranks.data", "allranks.nn.parallel", "allranks.resilience")

# What the first optimizer of a process imports: one second or two, in pieces.
_OF_OPTIMIZERS = ("sympy", "torch._dynamo")

_OF_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
_MOST_BYTES = 1 << 20  # of a function and its arguments


def preload(target: Target, environ: Mapping[str, str]) -> bool:
    """Imports torch into this process, which ranks are then forked from, if they may need it.

    Args:
        target: what they run: python.
        environ: of the ranks. torch's libraries read how to use threads when they are loaded.

    Returns:
        False if torch cannot be imported: then a fresh interpreter should meet the error, and show it if the
        program needs torch at all.
    """
    before = {name: os.environ.get(name) for name in _OF_OPENMP}
    os.environ.update({name: environ[name] for name in _OF_OPENMP if name in environ})
    gc.disable()  # with freeze: collections in the ranks leave the pages shared
    try:
        useful = _useful(target)
        for name in useful:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - whatever it is, the ranks meet it again
                if name == useful[0]:
                    return False
    finally:  # it is not the user's own setting, which counts when the job is started again
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    gc.freeze()
    return True


def preload_for_elastic_ranks() -> Iterator[None]:
    """Imports into the process that lost ranks are replaced from what they need, if it has torch.

    Yields after each piece: allranks first.
    """
    if "torch" not in sys.modules:
        return
    try:
        for names in ((*_OF_RANKS, *_OF_ELASTIC_RANKS), *((name,) for name in _OF_OPTIMIZERS)):
            for name in names:
                importlib.import_module(name)
            gc.freeze()
            yield
    except Exception:  # noqa: BLE001 - whatever it is, the ranks meet it again
        return


def _useful(target: Target) -> tuple[str, ...]:
    """What the ranks probably import. Nothing if a program names no module outside of the standard library: it runs a
    second earlier without torch.

    Nothing either if it sets variables that torch reads when it is loaded: then each rank loads it after that.

    And ends earlier, too: python and C++ take torch apart in every rank, which costs each 0.2 s of a CPU. A wrong
    guess costs time and nothing else.
    """
    if target.has_workers:
        return "torch", *_OF_WORKERS
    found = _named_by_function(target.payload) if target.kind == "function" else read_imports(target)
    if found is None:  # the ranks will report it; or it is a module that is installed
        return () if target.kind == "script" else ("torch",)
    if found.prepares_torch:
        return ()
    packages = {module.partition(".")[0] for module in found.modules}
    if found.all_known and packages <= sys.stdlib_module_names:
        return ()
    public = sorted(module for module in found.modules if "._" not in module)  # some of torch._x read sys.argv
    useful = ["torch", *(module for module in public if module.startswith(("torch.", "allranks.")))]
    if "allranks" in packages:
        useful += _OF_RANKS
    if any(re.search(rb"\boptim\b", source) for source in found.sources):
        useful += _OF_OPTIMIZERS
    return tuple(useful)


def _named_by_function(packed: bytes) -> Imports:
    """The names that its code uses are in what was packed; what it imports is not known."""
    head = packed[:_MOST_BYTES]
    return Imports({"allranks"} if b"allranks" in head else set(), all_known=False, sources=[head])
