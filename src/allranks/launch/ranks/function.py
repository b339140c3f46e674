"""A function, its arguments and its result, as bytes between the calling process and the ranks that run it.

The format is cloudpickle: definitions of a notebook or the main script travel by value, definitions of a module by
name. It is used only inside a job, whose ends trust each other: between a caller and the processes that it started.
Jobs that run scripts do not import this module.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType
from typing import Any

import cloudpickle

from allranks._base import pickling
from allranks._base.errors import UsageError

__all__ = ["name_of", "pack", "pack_error", "pack_result", "pieces", "unpack", "unpack_error", "unpack_result"]

_PIECE = 1 << 20  # bytes; the remaining pieces wait in the rank's pipe while the caller is behind
_LARGEST = 1 << 30  # bytes; a link to an agent accepts frames of up to 2 GiB


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function for error messages."""
    return str(getattr(fn, "__qualname__", None) or repr(fn))


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pack a call, with the data that a rank needs to find its modules and to show source lines in tracebacks.

    Raises:
        UsageError: the call cannot be pickled.
    """
    # The cells of a notebook are not files, so a rank cannot read their source.
    sources = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) > 1 and not os.path.exists(name)}
    file = io.BytesIO()
    try:
        pickler = _CallPickler(file)
        pickler.dump((fn, tuple(args), dict(kwargs)))
        pickler.dump(pickler.of_main)  # the same memo makes both refer to the same objects
        call = file.getvalue()
    except Exception as error:
        raise UsageError(
            f"{name_of(fn)} or one of its arguments cannot be pickled for the ranks: {error}.\n  Create files, locks,"
            " sockets and generators in the function itself."
        ) from error
    if len(call) > _LARGEST:
        raise UsageError(
            f"{name_of(fn)} and its arguments have {len(call)} bytes; the limit is {_LARGEST} bytes.\n  Read large data"
            " from a file in the ranks."
        )
    # The call is pickled separately: a rank unpickles it only after ``sys.path`` leads to its modules.
    return pickling.dumps((sys.path, sources, _main_program(), call))


def unpack(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpack on a rank the call that ``pack`` packed.

    Raises:
        UsageError: the call cannot be unpickled here.
    """
    path, sources, program, call = cloudpickle.loads(payload)
    # The caller's folders come first, so that both sides import the same modules.
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    for name, lines in sources.items():
        # Without a modification time, ``linecache.checkcache`` keeps an entry that has no file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    unpickler = pickle.Unpickler(io.BytesIO(call))
    try:
        fn, args, kwargs = unpickler.load()
        _make_main(program, unpickler.load())
    except Exception as error:
        raise UsageError(
            f"the function or one of its arguments cannot be unpickled: {type(error).__name__}: {error}.\n  Install the"
            " modules that it uses on this host too."
        ) from error
    return fn, args, kwargs


def pack_result(result: Any) -> memoryview:
    """Pack the result of a rank. Its GPU tensors become CPU tensors, because the caller may have no GPU.

    Raises:
        UsageError: the result cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except Exception as error:
        raise UsageError(
            f"the result of the function cannot be pickled for the caller: {type(result).__name__}: {error}.\n"
            "  Return a value that pickle supports, such as numbers, dicts and tensors."
        ) from error
    return buffer.getbuffer()


def unpack_result(data: bytearray, rank: int) -> Any:
    """Unpack in the caller the result that a rank packed.

    Raises:
        UsageError: the result cannot be unpickled here.
    """
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise UsageError(
            f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}.\n"
            "  Return an object whose class this process can import."
        ) from error


def pack_error(error: BaseException) -> bytes:
    """Pack the exception of a rank; b"" if it cannot be pickled or unpickled."""
    try:
        data = pickling.dumps(error)
        # Some exceptions can be pickled but not unpickled, for example if ``__init__`` has more arguments.
        cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - a user's exception may do anything; its text is reported in any case
        return b""
    return data


def unpack_error(data: bytes) -> Exception | None:
    """Unpack the exception of a rank; None if it cannot be raised here."""
    try:
        error = cloudpickle.loads(data) if data else None
    except Exception:  # noqa: BLE001 - as above
        return None
    return error if isinstance(error, Exception) else None


def pieces(data: memoryview) -> Iterator[bytes]:
    """Cut the data into pieces, so that no process on the way holds all of it twice."""
    return (bytes(data[begin : begin + _PIECE]) for begin in range(0, len(data), _PIECE))


def _main_program() -> tuple[str, str]:
    """Return the file of this process's program, and the name that ``python -m`` started; "" for none."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    return os.path.abspath(file) if file else "", spec.name if spec is not None else ""


def _make_main(program: tuple[str, str], values: Mapping[str, Any]) -> None:
    """Set the caller's classes and functions in ``__main__`` of a rank, where pickle searches for them.

    The spawned workers of a data loader run the caller's program, as they would in the caller.
    """
    main, (file, name) = sys.modules["__main__"], program
    vars(main).update(values)
    if name:
        main.__spec__ = ModuleSpec(name, None)
    elif file and os.path.exists(file):
        main.__file__ = file


class _CallPickler(pickling.Pickler):
    """Records the classes and functions of the main program that a call refers to.

    Attributes:
        of_main: these classes and functions, by name.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}
        self._main = vars(sys.modules["__main__"])

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            name = str(obj.__name__)
            if self._main.get(name) is obj:
                self.of_main[name] = obj
        return super().reducer_override(obj)


class _ResultPickler(pickling.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # If the program has not imported torch, the result contains no tensor.
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(self.proto)
        return super().reducer_override(obj)
