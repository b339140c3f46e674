"""torch's Flight Recorder in a program whose gloo groups are groups of allranks (torch 2.15 and later).

The recorder that torch names "gloo" accepts only calls of torch's own ProcessGroupGloo: the hook that records the calls
of other backends ignores a backend with that name. It records the calls of these groups under the name "allranks".
Python functions that read gloo's recorder are therefore replaced by functions that read that one.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from allranks._plugin.names import NAME
from allranks._watch import hooks

__all__ = ["is_requested", "record_instead_of_gloo"]

_c10d: Any = torch.distributed
_C: Any = torch._C._distributed_c10d
_GLOO = "gloo"
_RECORD = "fr_trace_json"
_ENDPOINTS = (_RECORD, "fr_dump_file")  # the endpoints of each rank from which torch's debug server reads a recorder


def is_requested(environ: Mapping[str, str]) -> bool:
    """Return whether torch attaches its recorder to groups of other backends, and the user has requested it.

    torch also attaches its recorder if it is not requested. The watcher needs the record only of torch's own backends.
    """
    if hooks.recorder_is_enabled_here:
        return False
    sizes = [environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    asked = next((size for size in sizes if size), "0")
    return hasattr(_c10d.distributed_c10d, "_maybe_attach_flight_recorder") and asked.strip() != "0"


def record_instead_of_gloo(environ: Mapping[str, str]) -> None:
    """Let torch record the calls of groups named gloo, and let readers of gloo's recorder read that record."""
    if not hasattr(_c10d.distributed_c10d, "_maybe_attach_flight_recorder"):
        return
    # torch attaches no recorder to a group whose backends are all in this set, because they record themselves.
    _c10d.distributed_c10d._FR_SELF_RECORDING_BACKENDS.discard(_GLOO)
    _C._dump_fr_trace = _reader(_C._dump_fr_trace, pickle.loads, pickle.dumps)
    _C._dump_fr_trace_json = _reader(_C._dump_fr_trace_json, json.loads, lambda trace: json.dumps(trace).encode())
    _C._dump_fr_trace_file = _reader(_C._dump_fr_trace_file)
    _C._reset_fr_trace = _reader(_C._reset_fr_trace)
    # The debug server fetches records from C++ handlers, which cannot be replaced. A server that is spawned imports
    # this too. Without a requested recorder, the record is empty and the import of 0.1 s is saved.
    if is_requested(environ):
        frontend: Any = importlib.import_module("torch.distributed.debug._frontend")
        frontend.fetch_all = _fetcher(frontend.fetch_all)


def _reader(
    torchs: Callable[..., Any], load: Callable[[bytes], Any] | None = None, dump: Callable[[Any], bytes] | None = None
) -> Callable[..., Any]:
    """Wrap a function of torch whose last argument is the name of a recorder.

    Args:
        torchs: The function.
        load: Decodes its result. None: the function returns no record.
        dump: Encodes the result.
    """

    @functools.wraps(torchs)
    def read(*args: Any, **named: Any) -> Any:
        *others, name = args if args and isinstance(args[-1], str) else (*args, named.pop("backend", _GLOO))
        if name != _GLOO:
            return torchs(*others, backend=name, **named)
        record = torchs(*others, backend=NAME, **named)
        if load is None or dump is None:
            return record
        return dump(_named_gloo(load(record)))

    return read


def _named_gloo(trace: dict[str, Any]) -> dict[str, Any]:
    for entry in trace.get("entries", ()):
        entry["profiling_name"] = entry["profiling_name"].replace(f"{NAME}:", f"{_GLOO}:", 1)
    return trace


def _fetcher(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function with which torch's debug server fetches the records of all ranks."""

    @functools.wraps(torchs)
    def fetch_all(endpoint: str, args: str = "", **named: Any) -> Any:
        if endpoint not in _ENDPOINTS or args not in ("", f"backend={_GLOO}"):
            return torchs(endpoint, args, **named)
        addresses, responses = torchs(endpoint, f"backend={NAME}", **named)
        for response in responses:
            if endpoint == _RECORD and response.status_code == 200:
                response.text = json.dumps(_named_gloo(json.loads(response.text)))
        return addresses, responses

    return fetch_all
