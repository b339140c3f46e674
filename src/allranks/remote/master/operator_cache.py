"""The calls with templates on workers. A call is sent once, as a template, and is then a frame of a few bytes.

The results of a new call must be known before it has run. torch's meta kernels compute them if they have been right
before (`protocol.signature`). Otherwise the master sends a request to a worker, and caches the answer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from allranks._base.errors import RemoteError
from allranks.remote.master.connections import Connections, exclusive
from allranks.remote.master.device_table import DeviceTable
from allranks.remote.protocol import wire
from allranks.remote.protocol.arguments import Form, form_of, packed_as
from allranks.remote.protocol.signature import (
    NO_FACTS,
    Signature,
    SignatureFacts,
    facts,
    flatten,
    indexes_by_mask,
    infer,
    may_trust_meta,
    signature,
)
from allranks.remote.protocol.wire import Ask, Define
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.dispatch import different_devices_error, unshare
from allranks.remote.torch_device.handle import AnsweredHandle, DeviceTarget, Handle, KnownCall, make, operands

__all__ = ["OperatorCache"]

_PROGRAMS = range(0xF000, 0x10000)  # the template numbers that captured steps use
# A template takes 4 KiB of a worker's memory and 3 KiB here, and a program with changing shapes defines new ones
# continually. After this number of definitions all templates are forgotten. The next ones use other numbers, because
# another thread may be about to call an old one. A worker therefore holds at most twice this number.
_TEMPLATES = 8192
_KINDS = 1 << 16  # limit of `_trusted`, which is checked when the templates are forgotten
# The results of these operators follow from their arguments alone. An upload consists of them, and must never wait for
# a busy worker, not even on the first call.
_ALWAYS_INFERRED = (torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default)


class OperatorCache:
    """Templates, by the operator and the signatures of the operands.

    Attributes:
        connections: The connections with the workers.
        templates: Operator, forms of its arguments and call, by number.
        programs: Numbers that are free for captured steps.
    """

    def __init__(self, connections: Connections, devices: DeviceTable) -> None:
        self.connections = connections
        self.templates: dict[int, tuple[Any, Any, Any, KnownCall]] = {}
        self.programs = list(_PROGRAMS)
        self._devices = devices
        self._next = wire.CALL
        self._end = wire.CALL + _TEMPLATES
        self._trusted: dict[Any, bool] = {}  # whether a meta kernel is right, by kind of call
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._shared: dict[Any, tuple[KnownCall, set[int]]] = {}  # calls, and the ranks that have their templates

    @exclusive
    def define(
        self, place: DeviceTarget, key: Any, op: Any, args: list[Form], kwargs: dict[str, Form],
        values: list[Any], results: list[Any], resized: list[tuple[int, Signature]], checked: bool,
    ) -> KnownCall:  # fmt: skip
        """Send a template to some workers.

        Args:
            place: The workers.
            key: The key of the call among their calls.
            op: The operator, or the name of an operation of allranks.
            args, kwargs: The forms of its arguments.
            values: The numbers of this call, in order.
            results: See `KnownCall.results`.
            resized: See `KnownCall.resized`.
            checked: The workers compare the results with `results` on each call.
        """
        known = (op, args, kwargs, values, results, resized, checked)
        self._known[self.connections.state, key] = known
        return self._describe(place, key, *known)

    def prepare(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        key: Any,
        place: DeviceTarget,
        refs: list[Any],
        values: list[Any],
    ) -> KnownCall | AnsweredHandle:
        """Return a call that is new to these workers, or its result if it cannot be inferred."""
        connections = self.connections
        connections.check(place)
        state = connections.state
        if (known := self._known.get((state, key))) is not None:
            return self._describe(place, key, *known)
        about = facts(op)
        if about.composite:
            return AnsweredHandle(op.decompose(*args, **kwargs))
        forms = [form_of(each, i in about.numbers, about.floats_matter) for i, each in enumerate(args)]
        named = {name: form_of(each, name in about.numbers, about.floats_matter) for name, each in kwargs.items()}
        if about.python is not None:
            return AnsweredHandle(about.python(*args, **kwargs))
        kind = (state, _kind(op, args, kwargs))
        # None: no worker has answered yet. False: the meta kernel was wrong, or may be wrong for these operands.
        trust = (op in _ALWAYS_INFERRED or self._trusted.get(kind)) if may_trust_meta(about, args, kwargs) else False
        if about.dynamic or indexes_by_mask(op, args):
            connections.refuse_recording(f"the shape or value that {about.name} returns depends on the data")
            return AnsweredHandle(self._run_now(about, args, kwargs, forms, named, place, refs, values)[0])
        if about.checks:
            connections.refuse_recording(f"{about.name} raises an error that depends on the data")
            return AnsweredHandle(self._run_now(about, args, kwargs, forms, named, place, refs, values)[0])
        inferred = None
        if trust is not False:
            try:
                inferred = _infer_results(op, about, args, kwargs)
            except Exception:  # noqa: BLE001 - the worker reports the error, or executes the call nevertheless
                trust = False
        if trust:
            assert inferred is not None
            # Even with a trusted kernel, each worker compares the results of the template's first call
            # (docs/decisions/059).
            return self.define(place, key, op, forms, named, values, *inferred, False)
        try:
            result, seen = self._run_now(about, args, kwargs, forms, named, place, refs, values)
        except RemoteError:
            if (fault := connections.poisoned) is None or inferred is None:
                raise
            # The result is poisoned like the operand. The error is reported only when the program uses the result.
            connections.forget_raised(fault)
            # Not stored in `_known`, because no worker has confirmed the results.
            return self._describe(place, key, op, forms, named, values, *inferred, True, guessed=True)
        if inferred is None:
            # Does not overwrite True: the kernel may be right in general, and not be believable for these operands.
            self._trusted.setdefault(kind, False)
        else:
            self._trusted[kind] = inferred == seen
        if seen is not None:
            checked = not self._trusted.get(kind, False)
            self._known[state, key] = (op, forms, named, values, *seen, checked)
        return AnsweredHandle(result)

    @exclusive
    def invoke(
        self,
        place: DeviceTarget,
        name: str,
        link: int,
        tensors: Sequence[Handle],
        arguments: Sequence[Any],
        results: Sequence[Signature] = (),
    ) -> list[Handle]:
        """Queue an operation of allranks (`worker.commands.OPERATIONS`). `link` is 0 if it needs none."""
        key = (name, *arguments, len(tensors), *(each._sig for each in tensors), *results)
        call = place.calls.get(key)
        if call is None:
            # The link is a number of the call, so that another group needs no other template.
            forms: list[Form] = [["l", *(["t"] for _ in tensors)], ["i"], *(["c", each] for each in arguments)]
            new = [("new", sig, which, False, 0) for which, sig in enumerate(results)]
            call = self.define(place, key, f"allranks::{name}", forms, {}, [link], new, [], False)
        refs = [each._ref for each in tensors]
        made: Any = place.call(place.target, here(1), call.number, refs, call.outputs, call.pack(link))
        made = [made] if len(results) == 1 else made or []
        return [make(place, sig, ref) for sig, ref in zip(results, made, strict=True)]

    def forget_worker(self, rank: int) -> None:
        """Mark that the new worker of this rank has no templates."""
        for _, known_by in self._shared.values():
            known_by.discard(rank)

    def _describe(
        self,
        place: DeviceTarget,
        key: Any,
        op: Any,
        args: Any,
        kwargs: Any,
        values: Any,
        results: Any,
        resized: Any,
        checked: Any,
        guessed: bool = False,
    ) -> KnownCall:
        """Send a call to some workers. Workers that have its template from another group keep it."""
        connections = self.connections
        # No two threads may use one number, and no thread may queue a call before its Define.
        with connections.lock:
            if (connections.state, key, guessed) not in self._shared:
                about = NO_FACTS if isinstance(op, str) else facts(op)
                outputs = sum(each is not None and each[0] == "new" for each in _entries(results))
                made = KnownCall(self._number(), about, values, results, outputs, resized)
                self.templates[made.number] = (op, args, kwargs, made)
                self._shared[connections.state, key, guessed] = made, set()
            call, known_by = self._shared[connections.state, key, guessed]
            if others := [rank for rank in place.ranks if rank not in known_by]:
                metas = [each[1].meta if each is not None and each[0] == "new" else None for each in _entries(results)]
                name = op if isinstance(op, str) else facts(op).name
                everyone = len(others) == len(place.ranks)
                for each in [place] if everyone else map(self._devices.worker, others):
                    connections.put(each, Define(call.number, name, args, kwargs, metas, checked))
                # Only after all messages are queued. If one fails, the next use sends them again.
                known_by.update(others)
        place.calls[key] = call
        return call

    def _number(self) -> int:
        """Return a number for a template."""
        if self._next == self._end:
            self.connections.refuse_recording("all templates receive new numbers", always=False)
            self.forget()
        self._next += 1
        return self._next - 1

    def forget(self) -> None:
        """Forget all templates. The next ones use the numbers of the other half."""
        self._devices.forget_calls()
        self._known.clear()
        self._shared.clear()
        if len(self._trusted) > _KINDS:
            self._trusted.clear()
        first_half = self._end > wire.CALL + _TEMPLATES
        self._next = wire.CALL + (0 if first_half else _TEMPLATES)
        self._end = self._next + _TEMPLATES

    def _run_now(
        self,
        about: SignatureFacts,
        args: Any,
        kwargs: Any,
        forms: Any,
        named: Any,
        place: DeviceTarget,
        refs: Any,
        values: Any,
    ) -> tuple[Any, Any]:
        """Make workers execute an operator immediately. Return its result, and the description of the result."""
        connections = self.connections
        connections.refuse_recording(f"{about.name} needs an answer from the workers", always=False)
        packed = struct.pack(f"<{packed_as(values)}", *values)
        for ref in refs:
            if ref.target != place.target:
                raise different_devices_error(about.name, args, kwargs)
        if about.writes and about.resizes:
            # Detached handles share one id, but the call reshapes only the handle that was passed.
            refs = unshare(operands(args, kwargs))
        number = connections.next_number()
        ids = [each.id for each in refs]
        connections.put(place, Ask(number, about.name, forms, named, ids, packed))
        try:
            returned, changed, counts = connections.wait_for_all(number, place, about.name)
        except BaseException:  # also Ctrl-C: workers keep the results until they receive this
            if not connections.closed:
                connections.command(place, "keep", of=number, ids=None)
            raise
        metas = [
            (wire.dtype_of(each[0]), torch.Size(each[1]), tuple(each[2]), *each[3:]) if isinstance(each, list) else each
            for each in returned
        ]
        before = operands(args, kwargs)
        resized = {
            i: (wire.dtype_of(d), torch.Size(s), tuple(t), 0, bits)
            for i, (d, s, t, _, bits) in ((int(i), meta) for i, meta in changed.items())
            if (torch.Size(s), tuple(t), bits) != before[i]._sig.look
        }
        base = before[0]._off if before else 0
        results, resize = _arrange(about, counts, metas, resized, base)
        new = [each for each in _entries(results) if each is not None and each[0] == "new"]
        made = connections.outbox.reserve(place.target, len(new))
        plain = [each for each in metas if not isinstance(each, tuple)]
        ids_of = iter(made)
        kept = [next(ids_of).id if each is not None and each[0] == "new" else None for each in _entries(results)]
        connections.command(place, "keep", of=number, ids=kept)
        if plain and all(each is not None for each in plain):
            return (metas[0] if len(metas) == 1 else tuple(metas)), None
        call = KnownCall(0, about, values, results, len(made), resize)
        call.only = None
        return call.build(place, made[0] if len(made) == 1 else made, args, kwargs), (results, resize)


def _infer_results(
    op: Any, about: SignatureFacts, args: Any, kwargs: Any
) -> tuple[list[Any], list[tuple[int, Signature]]]:
    """Infer the results of an operator, and the operands that it reshapes, with torch's meta kernel."""
    result, after = infer(op, args, kwargs)
    metas = [
        (each.dtype, each.shape, each.stride(), each.storage_offset(), wire.bits_of(each))
        if isinstance(each, torch.Tensor)
        else each
        for each in flatten(result)
    ]
    before = operands(args, kwargs)
    changed = {
        i: (meta.dtype, meta.shape, meta.stride(), 0, wire.bits_of(meta))
        for i, (meta, handle) in enumerate(zip(after, before, strict=True))
        if (meta.shape, meta.stride(), wire.bits_of(meta)) != handle._sig.look
    }
    return _arrange(about, _counts(about, result), metas, changed)


def _kind(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties that a call shares with calls of other shapes.

    A meta kernel may be right for one kind of call only. The one of batch_norm is right in training, and the one of
    embedding_bag in one of its modes.
    """
    sized = not operands(args, kwargs)  # integers define the size, as in arange

    def property_of(value: Any) -> Any:
        if isinstance(value, Handle):
            return value._sig.kind
        if isinstance(value, list | tuple) and value and all(type(each) is bool for each in value):
            return type(value), tuple(value)  # a mask of the requested results
        if isinstance(value, list | tuple | float | torch.Generator) or (sized and type(value) is int):
            return type(value)
        return type(value), value

    return (op, *map(property_of, args), *((name, property_of(value)) for name, value in kwargs.items()))


def _entries(results: list[Any]) -> list[Any]:
    return [one for each in results for one in (each if type(each) is list else [each])]


def _arrange(
    about: SignatureFacts, counts: list[int], metas: list[Any], changed: dict[int, Any], base: int = 0
) -> tuple[list[Any], list[tuple[int, Signature]]]:
    """Return the results of a call, in the form of `KnownCall.results`, and the operands that it reshapes.

    Args:
        about: The facts of the operator.
        counts: For each returned value the number of tensors in it; -1 if it is not a list.
        metas: dtype, shape, strides and offset of each tensor; any other returned value as it is.
        changed: The same properties of operands that have changed.
        base: The offset of the first operand in its storage.
    """
    following, made = iter(metas), [0]

    def entry(kind: str) -> Any:
        meta = next(following)
        if not isinstance(meta, tuple):
            return None
        if kind not in ("new", "view"):
            return ("same", kind)
        dtype, shape, strides, offset, bits = meta
        made[0] += 1
        return (
            "new",
            signature(dtype, shape, strides, bits),
            made[0] - 1,
            kind == "view",
            offset - base * (kind == "view"),
        )

    found: list[Any] = []
    for kind, count in zip(about.returns, counts, strict=True):
        plain = kind.removeprefix("*")
        found.append(entry(plain) if count < 0 else [entry(plain) for _ in range(count)])
    return found, [(i, signature(meta[0], meta[1], meta[2], meta[4])) for i, meta in changed.items()]


def _counts(about: SignatureFacts, result: Any) -> list[int]:
    """Return the number of elements in each returned value of an operator; -1 if it is not a list."""
    values = [] if not about.returns else [result] if len(about.returns) == 1 else result
    return [len(each) if isinstance(each, list | tuple) else -1 for each in values]
