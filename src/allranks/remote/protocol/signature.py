"""Infers the results of an operation before it has run.

A handle needs its shape immediately, and the master must not wait for it. The inferred results are cached by operator
and by the signatures of its operands (`Signature`). On a cache miss, torch's meta kernels compute them, which costs
85 us; the rest of the call costs 5 us. A meta kernel is trusted after it has agreed once with the real results of a
worker. If it is wrong or missing, the master requests each new shape from a worker, which then checks its results on
each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes

from allranks.remote.protocol import wire

__all__ = [
    "AUTOCAST", "WHOLE", "SignatureFacts", "Signature",
    "may_trust_meta", "facts", "flatten", "indexes", "indexes_by_mask", "infer", "marked", "signature",
]  # fmt: skip

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
"""The dispatch key that handles have in addition. torch has no autocast key for ``lazy``, and needs one to find the
tensors that `autocast` must cast."""


class Signature:
    """A dtype, a shape, strides and `bits_of`. Each combination has one object, so they compare by identity."""

    __slots__ = ("__weakref__", "bits", "dtype", "kind", "looks", "meta", "odd", "shape", "strides")

    def __init__(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], bits: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.bits = bits
        # The stride of a dimension of size 0 or 1 is arbitrary, and meta kernels choose other values than real kernels.
        self.odd = 0 in shape or (1 in shape and strides != torch.empty(shape, device="meta").stride())
        # The properties on which the correctness of a meta kernel depends. The order of the strides decides the
        # result's.
        self.kind = (dtype, len(shape), tuple(sorted(range(len(shape)), key=lambda each: -strides[each])), 0 in strides)
        # The arguments that `_core.make_handle` passes to torch.
        self.looks = (shape, strides, None, dtype, torch.strided, False, False, None, False, False, AUTOCAST)
        self.meta = (str(dtype).removeprefix("torch."), list(shape), list(strides), 0, bits)

    @property
    def look(self) -> tuple[torch.Size, tuple[int, ...], int]:
        """The properties that operators can change in place."""
        return self.shape, self.strides, self.bits

    def on_meta(self) -> torch.Tensor:
        return marked(torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta"), self.bits)


def marked(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Set the bits of a tensor (see `bits_of`), and return it."""
    if tensor.is_conj() != bool(bits & wire.CONJ):
        torch._C._set_conj(tensor, not tensor.is_conj())
    if tensor.is_neg() != bool(bits & wire.NEG):
        torch._C._set_neg(tensor, not tensor.is_neg())
    return tensor


# Weak references, because a program that uses new shapes continually would fill the memory.
_signatures: weakref.WeakValueDictionary[tuple[Any, ...], Signature] = weakref.WeakValueDictionary()


def signature(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], bits: int = 0) -> Signature:
    """Return the one signature with these properties."""
    key = (dtype, tuple(shape), tuple(strides), bits)
    if (found := _signatures.get(key)) is None:
        found = _signatures[key] = Signature(dtype, torch.Size(shape), tuple(strides), bits)
    return found


@dataclass(frozen=True, eq=False)
class SignatureFacts:
    """Properties of an operator that its schema defines.

    There is one object for each operator, so they compare by identity.

    Attributes:
        name: For example ``aten::add.Tensor``.
        numbers: Positions and names of the arguments that are numbers and that no shape depends on.
        floats_matter: A shape may depend on a float.
        returns: For each returned value: ``new``, ``view`` (of the first tensor), or the name of the argument that is
            written to and returned. A ``*`` precedes it if the value is a list.
        writes: It changes an argument.
        resizes: The argument that it returns may have another shape afterwards. This follows from the operator's name,
            or from an ``out`` argument.
        dynamic: The shape or value of its result depends on the data.
        checks: It raises an error or does nothing. The caller continues with other values, so the master waits for the
            answer.
        random: It draws random numbers.
        positions: Positions of the positional arguments, by name.
        composite: It consists of other operators, which are queued instead.
        factory: Its operands only define the properties of the result.
        trusts_meta: Its meta kernel may be trusted.
        python: Its body, if it is an operator of ``torch.library.custom_op``. Workers only have torch's operators.
    """

    name: str
    numbers: frozenset[int | str]
    floats_matter: bool
    returns: tuple[str, ...]
    writes: bool
    resizes: bool
    dynamic: bool
    checks: bool
    random: bool
    positions: dict[str, int]
    composite: bool = False
    factory: bool = False
    trusts_meta: bool = True
    python: Any = None


NO_FACTS = SignatureFacts("", frozenset(), False, (), False, False, False, False, False, {})
"""The facts of operations that are not torch's."""

_facts: dict[Any, SignatureFacts] = {}
WHOLE = {f"{each}.input" for each in ("lstm", "gru", "rnn_tanh", "rnn_relu")} | {
    "scaled_dot_product_attention", "linalg_eigvalsh", "linalg_eigvals", "linalg_svdvals", "matmul.out",
    "linalg_matrix_rank.out", "linalg_matrix_rank.out_tol_tensor",
    "linalg_matrix_rank.atol_rtol_float_out", "linalg_matrix_rank.atol_rtol_tensor_out", "one_hot",
}  # fmt: skip
"""Composite operators that are queued whole if autograd does not record them."""
_SIZED_BY_NUMBERS = {"arange", "range"}
_WRONG_META_KERNELS = {
    "_batch_norm_with_update", "_embedding_bag", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_linalg_eigh", "_linalg_slogdet",
    "_linalg_svd", "_native_batch_norm_legit", "linalg_eig", "linalg_lu_solve", "max_unpool2d", "native_batch_norm",
    "native_layer_norm", "nonzero_static",
}  # fmt: skip
"""Operators whose meta kernels, in torch 2.13, are right for some operands and wrong for others. They were found by a
comparison with the CPU kernels for all samples of torch's operator database."""

_RESIZING = {"resize_", "resize_as_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "set_"}
_INDEX = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_", "_unsafe_index_put"}


def facts(op: Any) -> SignatureFacts:
    """Return the properties that an operator's schema defines."""
    if (found := _facts.get(op)) is None:
        found = _facts[op] = _read(op)
    return found


def _read(op: Any) -> SignatureFacts:
    schema = op._schema
    base = schema.name.partition("::")[2]
    numbers: set[int | str] = set()
    tensors = False
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        tensors |= "Tensor" in kind
        if ("number" in kind or kind == "Tensor") and base not in _SIZED_BY_NUMBERS:
            numbers.add(argument.name if argument.kwarg_only else position)
    returns = []
    for returned in schema.returns:
        many = "*" if str(returned.type).startswith("List") else ""
        alias = returned.alias_info
        if alias is None:
            returns.append(many + "new")
        elif alias.is_write:
            names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.before_set & alias.before_set]
            returns.append(many + names[0])
        else:
            returns.append(many + "view")
    writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
    dynamic = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return SignatureFacts(
        name=f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
        numbers=frozenset(numbers),
        floats_matter=base in _SIZED_BY_NUMBERS or (not tensors and base not in ("full", "scalar_tensor")),
        returns=tuple(returns),
        writes=writes,
        resizes=base in _RESIZING or any(a.is_out for a in schema.arguments),
        dynamic=dynamic and base not in _INDEX,  # depends on the operands, see `indexes_by_mask`
        checks=tensors and not schema.returns and not writes,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        positions={a.name: i for i, a in enumerate(schema.arguments) if not a.kwarg_only},
        composite=_is_composite(op),
        factory=base.endswith("_like") or base.startswith("new_"),
        trusts_meta=base.removesuffix("_") not in _WRONG_META_KERNELS,
        python=_body(schema.name),
    )


def _body(name: str) -> Any:
    custom: Any = OPDEFS.get(name)
    return None if custom is None else custom._backend_fns.get("cpu") or custom._backend_fns.get(None)


def may_trust_meta(about: SignatureFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a meta kernel that has agreed once with a worker is also right for these operands."""
    return about.trusts_meta and not any(
        each._sig.odd for each in flatten([*args, *kwargs.values()]) if hasattr(each, "_sig")
    )


def _is_composite(op: Any) -> bool:
    has, name = op.has_kernel_for_dispatch_key, op._schema.name.removeprefix("aten::")
    # Workers execute an operator that has a kernel for CPUs as a whole, as torch does locally.
    if has(torch._C.DispatchKey.CPU) or f"{name}.{op._schema.overload_name}".removesuffix(".") in WHOLE:
        return False
    return bool(has(torch._C.DispatchKey.CompositeImplicitAutograd))


def indexes_by_mask(op: Any, args: Sequence[Any]) -> bool:
    """Return whether this is an indexing operation with a mask, whose data decides the shape of the result."""
    if op._schema.name.partition("::")[2] not in ("index", "_unsafe_index"):
        return False
    return any(map(_is_mask, args[1]))


def indexes(op: Any) -> bool:
    """Return whether this operator takes tensors as indexes."""
    return op._schema.name.partition("::")[2] in _INDEX


def infer(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """Run an operator on tensors without data. Return its results, and its operands after the call."""
    operands: list[torch.Tensor] = []
    # Modes of the caller, such as `with torch.device(...)`, must not change the result.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        given = [_on_meta(each, operands) for each in args]
        _compare_shapes(op, given)
        result = op(*given, **{name: _on_meta(each, operands) for name, each in kwargs.items()})
    return result, operands


def _compare_shapes(op: Any, given: Sequence[Any]) -> None:
    """Check shapes that torch's kernels check and its meta kernels do not, before anything is written.

    Raises:
        RuntimeError, IndexError: The shapes do not match. The master then sends the operation to a worker, whose error
            names the call site.
    """
    base = op._schema.name.partition("::")[2]
    if base in ("put", "put_") and given[1].numel() != given[2].numel():
        raise RuntimeError(f"{base}: expected as many indexes as values")
    if base in _INDEX and base not in ("index", "_unsafe_index") and not any(map(_is_mask, given[1])):
        given[2].expand(torch.ops.aten.index.Tensor(given[0], given[1]).shape)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _on_meta(value: Any, operands: list[torch.Tensor]) -> Any:
    if (sig := getattr(value, "_sig", None)) is not None:
        operands.append(sig.on_meta())
        return operands[-1]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, list | tuple):
        return [_on_meta(each, operands) for each in value]
    return value


def flatten(result: Any) -> Iterator[Any]:
    """Yield the tensors and other values that an operator returned, one by one."""
    if isinstance(result, list | tuple):
        for each in result:
            yield from flatten(each)
    else:
        yield result
