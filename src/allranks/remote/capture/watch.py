"""The values that a captured step reads from Python: described once, and compared before every replay.

A replay does not run the step's Python code. The values that this code reads must therefore be the same as in the
recording: learning rates in ``param_groups``, flags of modules, attributes, globals, closures, hooks, `requires_grad`.
The description starts at the function and follows its code: to the variables that the code names, and from each object
to the attributes that any code on the way names. Containers are described completely. ``core/python/bind_watch.cc``
compares the description.

The description ends at tensors, of which only the identity is compared, and at objects without Python contents: locks,
files, sockets. Code of torch, of Python's standard library and of this package only reads its arguments, and its flags,
which are part of a recording's key.
"""

from __future__ import annotations

import array
import collections
import collections.abc
import dis
import enum
import functools
import io
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from allranks import _core
from allranks._base.errors import UsageError
from allranks._call.bytes import bytes_of
from allranks._call.callsite import is_program
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["ReachableValues", "random_state"]

Description = tuple[Any, ...]

_MAX_VALUES = 200_000  # maximum number of containers and objects
_MAX_DEPTH = 100  # maximum depth of nested values
_MAX_COMPARED_ELEMENTS = (
    1024  # maximum elements of a tensor of the master whose data is compared, in addition to its version
)
_NOTHING: Description = ("is", ..., ())
_ANY: Description = ("all", None, ())

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.layout, torch.memory_format)
_UNREAD = {
    f"__{each}__"
    for each in (
        "init", "new", "repr", "str", "format", "del", "reduce", "reduce_ex", "getstate", "setstate", "dir", "sizeof",
        "init_subclass", "subclasshook", "setattr", "delattr", "class_getitem", "copy", "deepcopy",
        "weakref", "dict", "doc", "module",
    )
}  # fmt: skip
"""Methods that a step does not run implicitly. The other special methods may run although no code names them."""

_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, collections.Counter, torch.Size)
_READERS = {"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "__getattribute__", "__getattr__"}


class _Reads(NamedTuple):
    """The names in a code object, and in the functions that are defined in it."""

    variables: frozenset[str]  # global variables
    modules: frozenset[str]  # imported modules
    attributes: frozenset[str]
    texts: frozenset[str]  # strings that may be names of attributes
    computes: bool  # names of attributes are computed: getattr(self, f"layer{n}")


@functools.lru_cache(maxsize=8192)
def _reads(code: types.CodeType) -> _Reads:
    variables: set[Any] = set()
    modules: set[Any] = set()
    attributes: set[Any] = set()
    texts: set[str] = set()
    in_reader_call = computes = False
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            variables.add(each.argval)
            # Until the next call instruction: an f-string in the arguments of getattr computes a name.
            in_reader_call = each.argval in _READERS
        elif each.opname == "IMPORT_NAME":
            modules.add(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "IMPORT_FROM"):
            attributes.add(each.argval)
        elif each.opname.startswith(("FORMAT_", "BUILD_STRING")):
            computes |= in_reader_call
        elif each.opname.startswith("CALL"):
            in_reader_call = False
    if not _READERS.isdisjoint(variables | attributes):
        for each in code.co_consts:
            words: Any = each if isinstance(each, tuple) else (each,)
            texts |= {word for word in words if _is_name(word)}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            inner = _reads(each)
            variables |= inner.variables
            modules |= inner.modules
            attributes |= inner.attributes
            texts |= inner.texts
            computes |= inner.computes
    names = frozenset(attributes | texts)
    return _Reads(frozenset(variables), frozenset(modules), names, frozenset(texts), computes)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


class ReachableValues:
    """The values that a function can read.

    Attributes:
        iterators: The names of iterators that it can read. Their next values cannot be predicted.
    """

    def __init__(self) -> None:
        self.iterators: list[str] = []
        self._names: set[str] = set()  # attributes that the code on the way names
        self._texts: set[str] = set()  # those attributes that the code may access by a string
        self._computing: set[types.CodeType] = set()  # code objects that compute names of attributes
        self._seen: dict[int, Any] = {}
        self._ancestors: set[int] = set()
        self._label = ""
        self._count = 0

    def watch(self, value: Any) -> _core.Watch:
        """Describe a value, and the values that can be reached from it.

        Raises:
            UsageError: There are too many values.

        Cost:
            About 5 us for each value. The comparison takes about 15 ns for each.
        """
        while True:
            before = len(self._names), len(self._computing)
            self.iterators.clear()
            self._seen.clear()
            self._count = 0
            described = self._describe(value)
            # Code that is found late may name attributes of objects that were already described. Then a further
            # round describes all of them again.
            if (len(self._names), len(self._computing)) == before:
                self._seen.clear()
                return _core.Watch(described)

    def _describe(self, value: Any) -> Description:
        if type(value) in _PLAIN:
            return ("is", value, ())
        number = id(value)
        if number in self._ancestors:  # a reference cycle of objects; not all of them support weak references
            return _weakly(value) or _ANY
        if number in self._seen:
            # Its first occurrence is described completely, so further ones compare the identity only.
            if isinstance(value, torch.Tensor):
                return ("is", value, ())
            if (known := _weakly(value)) is not None:
                return known
        self._count += 1
        if self._count > _MAX_VALUES or len(self._ancestors) > _MAX_DEPTH:
            raise UsageError(
                f"capture: the step can read more values than can be compared on each call, the last one in"
                f" {self._label}.\n  Pass the values that it needs as arguments."
            )
        self._seen[number] = value  # holds the value, so that its id is not reused
        self._ancestors.add(number)
        try:
            return self._describe_contents(value)
        finally:
            self._ancestors.discard(number)

    def _describe_contents(self, value: Any) -> Description:
        for kind, describe in _KINDS:
            if isinstance(value, kind):
                return describe(self, value)
        package = type(value).__module__.partition(".")[0]
        if package == "numpy" and (described := self._of_numpy(value)) is not None:
            return described
        if package == "allranks" and not isinstance(value, torch.nn.Module):
            return _weakly(value) or ("is", value, ())
        if isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase) and not _has_dict(value):
            self.iterators.append(self._label)
        return self._object(value)

    def _named(self, name: str, description: Callable[[], Description]) -> Description:
        before, self._label = self._label, name
        try:
            return ("named", name, (description(),))
        finally:
            self._label = before

    # Code.

    def _function(self, function: types.FunctionType) -> Description:
        parts: list[Description] = [_attribute("__code__", ("is", function.__code__, ()))]
        for name in ("__defaults__", "__kwdefaults__"):
            parts.append(_attribute(name, self._describe(getattr(function, name))))
        if function.__closure__ is not None:
            names = function.__code__.co_freevars
            cells = zip(names, (functools.partial(self._cell, each) for each in function.__closure__), strict=True)
            items = [_attribute("cell_contents", self._named(*each)) for each in cells]
            parts.append(_attribute("__closure__", ("items", None, items)))
        if is_program(function.__code__.co_filename):
            reads = _reads(function.__code__)
            if reads.computes:
                self._computing.add(function.__code__)
            parts += self._read(reads, function.__globals__)
        if function.__dict__:
            parts.append(self._variables(function.__dict__, self._names | {"__wrapped__"}))
        return ("all", None, parts)

    def _cell(self, cell: Any) -> Description:
        try:
            contents = cell.cell_contents
        except ValueError:  # the cell is empty
            return _NOTHING
        return self._describe(contents)

    def _read(self, reads: _Reads, variables: dict[str, Any]) -> Iterator[Description]:
        self._names |= reads.attributes
        self._texts |= reads.texts
        builtin = variables.get("__builtins__", {})
        known = builtin if isinstance(builtin, dict) else vars(builtin)
        names = sorted(name for name in reads.variables if name in variables or name not in known)
        described = [
            self._named(name, functools.partial(self._describe, variables[name])) if name in variables else _NOTHING
            for name in names
        ]
        yield _attribute("__globals__", ("keys", None, described, names))
        for name in sorted(reads.modules):
            found = functools.partial(_module, name)
            yield ("call", found, (self._named(name, functools.partial(self._describe, found(None))),))

    def _method(self, method: types.MethodType) -> Description:
        owner = self._named("self", functools.partial(self._describe, method.__self__))
        return ("all", None, (_attribute("__self__", owner), _attribute("__func__", self._describe(method.__func__))))

    def _partial(self, partial: functools.partial[Any]) -> Description:
        parts = [_attribute(each, self._describe(getattr(partial, each))) for each in ("func", "args", "keywords")]
        return ("all", None, parts)

    def _cached(self, function: Any) -> Description:
        return _attribute("__wrapped__", self._describe(function.__wrapped__))

    def _property(self, value: property) -> Description:
        return _attribute("fget", self._describe(value.fget))

    def _builtin(self, function: types.BuiltinFunctionType) -> Description:
        owner = function.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return ("is", function, ())
        return (
            "all",
            None,
            (_attribute("__name__", ("is", function.__name__, ())), _attribute("__self__", self._describe(owner))),
        )

    def _module(self, module: types.ModuleType) -> Description:
        if not _is_programs(module.__name__):
            return _weakly(module) or _ANY
        return self._variables(vars(module), self._names, f"{module.__name__}.")

    def _class(self, kind: type) -> Description:
        """Describe a class: the methods that the code on the way names, and those that Python calls implicitly."""
        if not _is_programs(kind.__module__) or issubclass(kind, enum.Enum):
            return ("weak", weakref.ref(kind), ())
        parts: list[Description] = [("weak", weakref.ref(kind), ())]
        found: dict[str, Any] = {}
        for each in kind.__mro__:
            if _is_programs(each.__module__):
                found = {**vars(each), **found}
        for name, member in found.items():
            if name in self._names or name == "forward" or (_is_special(name) and name not in _UNREAD):
                if isinstance(member, functools.cached_property):
                    parts.append(_attribute(name, _attribute("func", self._describe(member.func))))
                # Other descriptors are omitted, because a read of the attribute would run their code.
                elif isinstance(member, types.FunctionType | staticmethod | classmethod | property) or not hasattr(
                    type(member), "__get__"
                ):
                    parts.append(_attribute(name, self._describe(getattr(kind, name))))
        return ("all", None, parts)

    # Objects.

    def _object(self, value: Any) -> Description:
        kind = type(value)
        parts: list[Description] = [("type", weakref.ref(kind), ())]
        if _is_programs(kind.__module__):
            parts.append(("class", None, (self._describe(kind),)))
        names = self._names | _own_names(kind, self._names)
        if self._computing and _is_programs(kind.__module__) and self._is_computed(kind):
            names |= {each for klass in kind.__mro__ for each in vars(klass)} | set(getattr(value, "__dict__", ()))
        if _has_dict(value):
            parts.append(self._variables(value.__dict__, names, of=kind))
        for each in kind.__mro__:
            for name, member in vars(each).items():
                # The attributes in `__slots__`, which are not in `__dict__`.
                if isinstance(member, types.MemberDescriptorType) and name in names and _is_programs(each.__module__):
                    parts.append(_attribute(name, self._describe(getattr(value, name, ...))))
        return ("all", None, parts) if len(parts) > 1 else _weakly(value) or ("is", value, ())

    def _is_computed(self, kind: type) -> bool:
        """Return whether names of its attributes are computed, by its own method or outside of classes."""
        own = {each for klass in kind.__mro__ for member in vars(klass).values() for each in _codes(member)}
        return any(each in own or each.co_varnames[:1] != ("self",) for each in self._computing)

    def _variables(self, found: dict[str, Any], names: Iterable[str], prefix: str = "", of: Any = None) -> Description:
        """Describe the variables of these names.

        If an object lacks an attribute, its absence is part of the description. The attribute may later hide one of the
        class, or be accessed by a string.
        """
        keys = sorted(name for name in names if name in found)
        if of is not None:
            may_appear = {name for name in (*self._names, "forward") if hasattr(of, name)}
            if _is_programs(of.__module__):
                may_appear |= self._texts
            keys += sorted(may_appear - set(keys))
        described = []
        for name in keys:
            each = self._describe(found[name]) if name in found else _NOTHING
            described.append(("named", prefix + name, (each,)) if prefix else each)
        return ("vars", None, (("keys", None, described, keys),))

    # Containers.

    def _dict(self, value: dict[Any, Any]) -> Description:
        keys = [key if type(key) in _PLAIN else None for key in value]
        parts: Description = ("dict", None, [self._describe(each) for each in value.values()], keys)
        return self._with_attributes(value, parts)

    def _items(self, value: Any) -> Description:
        parts: Description = ("items", None, [self._describe(each) for each in value])
        return self._with_attributes(value, parts)

    def _with_attributes(self, value: Any, parts: Description) -> Description:
        """Describe a container of a class that also has attributes."""
        if type(value) in _CONTAINERS or not _has_dict(value):
            return parts
        return ("all", None, (parts, self._object(value)))

    def _deque(self, value: Any) -> Description:
        return ("call", tuple, (("items", None, [self._describe(each) for each in value]),))

    def _set(self, value: Any) -> Description:
        return ("call", frozenset, (("equal", frozenset(value), ()),))

    def _bytes(self, value: Any) -> Description:
        return ("call", bytes, (("is", bytes(value), ()),))

    def _proxy(self, value: Any) -> Description:
        return ("call", dict, (self._dict(dict(value)),))

    def _equal(self, value: Any) -> Description:
        return ("equal", value, ())

    def _plain(self, value: Any) -> Description:
        return ("is", value, ())

    # Tensors, and numbers that do not come from the program.

    def _tensor(self, x: torch.Tensor) -> Description:
        """Describe the identity of a tensor, and its gradient.

        A handle reports changes of its other properties when they are set (`Handle._end_watch`).
        """
        parts: list[Description] = [("is", x, ())]
        if x.requires_grad and x.is_leaf:
            grad = x.grad
            parts.append(
                _attribute("grad", ("is", grad, ()) if not isinstance(grad, RemoteTensor) else _weak_ref(grad))
            )
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if (hooks := getattr(x, name)) is not None:
                    parts.append(_attribute(name, self._describe(hooks)))
        if not isinstance(x, RemoteTensor):
            if not x.is_inference():  # inference tensors have no version counter
                parts.append(_attribute("_version", ("is", x._version, ())))
            # A change through `x.data` does not increase the version of `x`, so small tensors are compared by their
            # data.
            if (
                type(x) in (torch.Tensor, torch.nn.Parameter)
                and x.device.type == "cpu"
                and x.numel() <= _MAX_COMPARED_ELEMENTS
            ):
                parts.append(("call", _data_of, (("is", _data_of(x), ()),)))
        return ("all", None, parts) if len(parts) > 1 else parts[0]

    def _generator(self, generator: torch.Generator) -> Description:
        if generator.device.type != "cpu":
            return ("is", generator, ())
        return ("call", _state_of, (("is", _state_of(generator), ()),))

    def _of_numpy(self, value: Any) -> Description | None:
        if isinstance(value, sys.modules["numpy"].ndarray):
            self._count += value.size
            return ("call", _contents, (("is", _contents(value), ()),))
        if hasattr(value, "bit_generator") or hasattr(value, "get_state"):
            return ("call", _pickled_state, (("is", _pickled_state(value), ()),))
        return ("is", value, ()) if hasattr(value, "dtype") else None

    def _random(self, generator: random.Random) -> Description:
        return ("call", type(generator).getstate, (("equal", generator.getstate(), ()),))


def _data_of(x: torch.Tensor) -> bytes:
    if x.layout is not torch.strided or x.is_quantized:
        return b""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return bytes_of(plain)


def _contents(array: Any) -> bytes:
    """Return the contents of an array, with its dtype and shape."""
    data = pickle.dumps(array) if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype.str}{array.shape}".encode() + data


def _state_of(generator: torch.Generator) -> bytes:
    return _data_of(generator.get_state())


def _pickled_state(generator: Any) -> bytes:
    return pickle.dumps(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def random_state() -> tuple[Any, ...]:
    """Return the states of the master's random generators: Python's, numpy's, and torch's on the CPU."""
    numpy: Any = sys.modules.get("numpy")
    drawn = pickle.dumps(numpy.random.get_state()) if numpy is not None else b""
    return random.getstate(), drawn, _state_of(torch.default_generator)


def _attribute(name: str, description: Description) -> Description:
    return ("attr", name, (description,))


def _weak_ref(x: RemoteTensor) -> Description:
    """Describe the identity of a tensor without keeping it alive."""
    return _attribute("_ref", ("weak", weakref.ref(x._ref), ()))


def _weakly(value: Any) -> Description | None:
    try:
        return ("weak", weakref.ref(value), ())
    except TypeError:
        return None


def _has_dict(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _module(name: str, _: Any) -> Any:
    return sys.modules.get(name)


@functools.lru_cache(maxsize=4096)
def _is_programs(module: str | None) -> bool:
    """Return whether a module belongs to the program or a package that it uses, not to torch, Python or allranks."""
    name = module or ""
    if name.partition(".")[0] == "numpy":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return is_program(file) if file else name.partition(".")[0] not in sys.stdlib_module_names


def _own_names(kind: type, names: set[str]) -> frozenset[str]:
    """Return the attributes that torch's code reads from an object of torch's own classes, such as an optimizer."""
    of_torch = tuple(
        each for each in kind.__mro__ if (each.__module__ or "").partition(".")[0] in ("torch", "allranks")
    )
    if not of_torch:
        return frozenset()
    methods = _methods(of_torch)
    return _read_by(of_torch, frozenset(name for name in names if name in methods))


@functools.lru_cache(maxsize=1024)
def _methods(kinds: tuple[type, ...]) -> dict[str, list[types.CodeType]]:
    found: dict[str, list[types.CodeType]] = {}
    for each in kinds:
        for name, member in vars(each).items():
            found.setdefault(name, []).extend(_codes(member))
    return found


def _codes(member: Any) -> Iterator[types.CodeType]:
    """Yield the code of a method, and of the functions that its decorators have wrapped."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, types.FunctionType):
        yield member.__code__
        for cell in member.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            if inner is not member and isinstance(inner, types.FunctionType):
                yield from _codes(inner)


@functools.lru_cache(maxsize=1024)
def _read_by(kinds: tuple[type, ...], named: frozenset[str]) -> frozenset[str]:
    methods = _methods(kinds)
    ahead = [name for name in methods if (_is_special(name) and name not in _UNREAD) or name == "forward"]
    ahead += named
    found: set[str] = set()
    while ahead:
        for code in methods.get(ahead.pop(), ()):
            new = _reads(code).attributes - found
            found |= new
            ahead += [name for name in new if name in methods]
    return frozenset(found)


_KINDS: tuple[tuple[Any, Callable[[ReachableValues, Any], Description]], ...] = (
    ((int, float, complex, str, bytes, enum.Enum), ReachableValues._plain),
    (torch.Tensor, ReachableValues._tensor),
    (types.FunctionType, ReachableValues._function),
    (types.MethodType, ReachableValues._method),
    (functools.partial, ReachableValues._partial),
    (functools._lru_cache_wrapper, ReachableValues._cached),
    (property, ReachableValues._property),
    (types.BuiltinFunctionType, ReachableValues._builtin),
    (types.ModuleType, ReachableValues._module),
    (type, ReachableValues._class),
    (dict, ReachableValues._dict),
    (types.MappingProxyType, ReachableValues._proxy),
    ((list, tuple), ReachableValues._items),
    (collections.deque, ReachableValues._deque),
    ((set, frozenset), ReachableValues._set),
    ((bytearray, memoryview, array.array), ReachableValues._bytes),
    (torch.device, ReachableValues._equal),
    (torch.Generator, ReachableValues._generator),
    (random.Random, ReachableValues._random),
)
