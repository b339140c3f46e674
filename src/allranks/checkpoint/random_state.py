"""State of random number generators, as a part of a checkpoint. Each rank has its own."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from allranks._base.errors import UsageError
from allranks._call import callsite

__all__ = ["RandomState"]

_cuda: Any = torch.cuda  # most of its functions have no annotations


class RandomState:
    """The generators of torch (CPU and CUDA), of ``random``, and of NumPy if the program has imported it.

    Put it into the state that is saved: ``{"model": model, "random": RandomState()}``. The state of the generators is
    read by a save, and set by a load.
    """

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        # Reading the states would initialize CUDA in a program that does not use it.
        if _cuda.is_initialized():
            found["cuda"] = _cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            found["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or "torch" not in state or "python" not in state:
            raise UsageError(
                f"RandomState.load_state_dict: expected the result of RandomState.state_dict(), got a"
                f" {type(state).__name__}" + (f" with the keys {list(state)[:5]}" if isinstance(state, dict) else "")
            )
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "cuda" in state:
            self._set_cuda(state["cuda"])
        if "numpy" in state and "numpy" in sys.modules:
            kind, keys, *rest = state["numpy"]
            sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))

    def _set_cuda(self, states: list[torch.Tensor]) -> None:
        devices = _cuda.device_count() if _cuda.is_available() else 0
        if len(states) == devices:
            _cuda.set_rng_state_all(states)
            return
        callsite.warn(
            f"RandomState: the generators of {len(states)} CUDA devices were saved, but this process has {devices}. Its"
            " CUDA generators are unchanged, so random numbers on CUDA differ from those of an uninterrupted run.\n"
            f"  To restore them, start the process with {len(states)} visible CUDA devices."
        )
