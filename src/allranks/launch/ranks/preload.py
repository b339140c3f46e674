"""Imports torch into the process that ranks are forked from: once for all of them.

It imports torch by name. No other module of the launcher does, so it starts without torch, and works with a broken one.
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

# Imports of a rank between ``import allranks`` and its first collective: 0.25 s.
_OF_RANKS = ("allranks._api.world", "allranks._engines.native.engine")

# Additional imports of the ranks of an elastic job.
_OF_ELASTIC_RANKS = ("allranks.data", "allranks.nn.parallel", "allranks.resilience")

# Imports of the first optimizer of a process: 1 s to 2 s, in pieces.
_OF_OPTIMIZERS = ("sympy", "torch._dynamo")

_OF_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
_MOST_BYTES = 1 << 20  # bytes of a packed call that are searched for names; arguments may be large


def preload(target: Target, environ: Mapping[str, str]) -> bool:
    """Import torch into this process, from which ranks are then forked, if they may need it.

    Args:
        target: the target of the ranks, which is python.
        environ: environment of the ranks. torch's libraries read their thread settings at import.

    Returns:
        False if torch cannot be imported. A fresh interpreter should then raise the error, and only if the program
        needs torch.
    """
    before = {name: os.environ.get(name) for name in _OF_OPENMP}
    os.environ.update({name: environ[name] for name in _OF_OPENMP if name in environ})
    gc.disable()  # with freeze: collections in the ranks leave the pages shared
    try:
        useful = _useful(target)
        for name in useful:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - the ranks raise the same error again
                # The first module is torch. Without one of the others, a fork still saves the import of torch.
                if name == useful[0]:
                    return False
    finally:  # these are not the user's own settings, which count when the job restarts
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    gc.freeze()
    return True


def preload_for_elastic_ranks() -> Iterator[None]:
    """Import the modules of elastic ranks into the process that replaces lost ranks, if it has torch.

    It yields after each group of modules; the first group is allranks.
    """
    if "torch" not in sys.modules:
        return
    try:
        # Optimizers are last and separate: a request must not wait for all of their imports.
        for names in ((*_OF_RANKS, *_OF_ELASTIC_RANKS), *((name,) for name in _OF_OPTIMIZERS)):
            for name in names:
                importlib.import_module(name)
            gc.freeze()
            yield
    except Exception:  # noqa: BLE001 - the ranks raise the same error again
        return


def _useful(target: Target) -> tuple[str, ...]:
    """Return the modules that the ranks probably import.

    Empty if a program imports only the standard library: it starts a second earlier without torch.

    Also empty if it sets variables that torch reads at import: each rank then imports torch after that.

    A rank without torch also exits earlier: python and C++ tear torch down in every rank, which costs 0.2 s of CPU time
    each. A wrong guess only costs time.
    """
    if target.has_workers:
        return "torch", *_OF_WORKERS
    found = _named_by_function(target.payload) if target.kind == "function" else read_imports(target)
    if found is None:  # the ranks will report the error; or the target is an installed module
        return () if target.kind == "script" else ("torch",)
    if found.prepares_torch:
        return ()
    packages = {module.partition(".")[0] for module in found.modules}
    if found.all_known and packages <= sys.stdlib_module_names:
        return ()
    public = sorted(module for module in found.modules if "._" not in module)  # some modules of torch._x read sys.argv
    useful = ["torch", *(module for module in public if module.startswith(("torch.", "allranks.")))]
    if "allranks" in packages:
        useful += _OF_RANKS
    if any(re.search(rb"\boptim\b", source) for source in found.sources):
        useful += _OF_OPTIMIZERS
    return tuple(useful)


def _named_by_function(packed: bytes) -> Imports:
    """Return the modules that a packed function names. Its code contains names, but its imports are not known."""
    head = packed[:_MOST_BYTES]
    return Imports({"allranks"} if b"allranks" in head else set(), all_known=False, sources=[head])
