"""Comparison of operators on a worker with operators on the CPU, based on torch's operator database.

The database (`torch.testing._internal.common_methods_invocations.op_db`) is part of torch. For each operator it has
useful inputs, and inputs that must be refused. A case is one of these inputs. It is run with the same seed on CPU
tensors of this process and on tensors of a worker. The results, the operands after the call, and the gradients must be
bitwise equal (all NaN are equal). If the CPU refuses an input, the worker must refuse it with the same exception type.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.testing._comparison import default_tolerances

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["DTYPES", "WORKER", "Case", "Verdict", "cases", "database", "judge", "judge_operator"]

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

PASS, ROUNDED, ERROR, WRONG, UNDEFINED = "pass", "rounded", "clear error", "WRONG", "undefined"
UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators that return uninitialized memory: only shape, dtype and similar properties can be compared."""

WORKER = "worker:1"


def database() -> list[OpInfo]:
    """Return all operators.

    The import takes seconds. It is in this function, because otherwise each process of pytest-xdist would repeat it.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # For each sample, the database searches for a running unittest, to store the number of the sample there. pytest
    # runs none, and the search reads the source of every frame, which takes four fifths of the time.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return list(op_db)


class Case(NamedTuple):
    """One call to try: the operator's ``plain``, ``in place`` or ``out=`` form, or one that must be ``refused``."""

    operator: OpInfo
    dtype: torch.dtype
    form: str
    number: int
    sample: SampleInput

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operator.formatted_name}[{dtype}] {self.form} #{self.number}"


class Verdict(NamedTuple):
    """Result of a comparison: PASS, ROUNDED, ERROR (the worker or the master refuses), WRONG or UNDEFINED; and why.

    ROUNDED: values differ by no more than `torch.testing.assert_close` allows. The order in which torch adds depends on
    the memory address, and torch uses other formulas for the derivatives of tensor subclasses.

    UNDEFINED: CPU tensors give no result that can be compared. It is not strided, or it differs between calls.
    """

    kind: str
    why: str = ""


class Differs(Exception):
    """The results of the CPU and of the worker differ."""


class Rounded(Differs):
    """The results of the CPU and of the worker differ only by rounding."""


class Unstrided(Exception):
    """A result is sparse, nested or quantized."""


def cases(operator: OpInfo, dtype: torch.dtype, most: int | None = None) -> Iterator[Case]:
    """Yield the cases of an operator, at most `most` of each form."""
    gradients = backward(operator, dtype)
    # Some sample functions fail on meta tensors, so use CPU tensors. All draw from the global random generator.
    torch.manual_seed(1)
    samples = list(islice(operator.sample_inputs("cpu", dtype, requires_grad=gradients), most))
    yield from (Case(operator, dtype, "plain", i, each) for i, each in enumerate(samples))
    if operator.inplace_variant is not None:
        inplace = [each for each in samples if isinstance(each.input, torch.Tensor)]
        yield from (Case(operator, dtype, "in place", i, each) for i, each in enumerate(inplace))
    if operator.supports_out:
        yield from (Case(operator, dtype, "out=", i, each) for i, each in enumerate(samples))
    if operator.error_inputs_func is not None and dtype is torch.float32:
        for i, each in enumerate(islice(operator.error_inputs("cpu"), most)):
            yield Case(operator, dtype, "refused", i, each.sample_input)


def backward(operator: OpInfo, dtype: torch.dtype) -> bool:
    return operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")


def judge_operator(operator: OpInfo, dtype: torch.dtype, most: int | None = None) -> list[tuple[Case, Verdict]]:
    """Judge all cases of an operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(case, judge(case)) for case in cases(operator, dtype, most)]


def judge(case: Case) -> Verdict:
    """Run a case on the CPU and on a worker, and compare the outcomes."""
    try:
        here, there = (_attempt(case, place) for place in (_Here(), _There()))
    except Differs as differs:
        return Verdict(WRONG, str(differs))
    except Unstrided:
        return Verdict(UNDEFINED)
    if isinstance(here, Exception):
        if not isinstance(there, Exception):
            return Verdict(WRONG, f"not refused: {type(here).__name__}: {here}")
        if isinstance(there, type(here)) or type(there).__name__ == type(here).__name__:
            return Verdict(PASS)
        return Verdict(ERROR, f"refused by {_said(there)}, not by {_said(here)}")
    if isinstance(there, Exception):
        return Verdict(ERROR, _said(there))
    try:
        _compare(here, there, values=case.operator.name not in UNSET)
    except Differs as differs:
        if not _steady(case, here):
            return Verdict(UNDEFINED)
        return Verdict(ROUNDED if isinstance(differs, Rounded) else WRONG, str(differs))
    return Verdict(PASS)


def _steady(case: Case, here: dict[str, list[Any]]) -> bool:
    """Return whether the CPU's results are reproducible. Some results contain uninitialized memory."""
    for size in (10, 100, 1000, 10000):
        torch.full((size,), float(size))  # freed memory that the next call may reuse without initializing it
        again = _attempt(case, _Here())
        try:
            _compare(here, again, values=True)  # type: ignore[arg-type]
        except Differs:
            return False
    return True


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Here:
    """The CPU side, with copies of the tensors of the sample."""

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        return _copy(tensor)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _There(_Here):
    """The worker side, with tensors of the same strides."""

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj():
            return self.take(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self.take(torch._neg_view(tensor)))
        if tensor.layout is not torch.strided:
            return tensor.to(WORKER)
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        flat = tensor.as_strided((span,), (1,)).to(WORKER)
        return flat.as_strided(tensor.shape, tensor.stride(), 0)

    def device(self) -> torch.device:
        return torch.device(WORKER)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "worker":
            raise Differs(f"a result is on {tensor.device}")
        return tensor.detach().cpu()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        return _copy(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_copy(torch._neg_view(tensor)))
    if tensor.layout is not torch.strided:
        return tensor.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _attempt(case: Case, side: _Here) -> dict[str, list[Any]] | Exception:
    """Return the results of a case on one side, or the exception that it raises."""
    try:
        return _call(case, side)
    except (Differs, Unstrided):
        raise
    except Exception as error:  # noqa: BLE001 - the exceptions of both sides are compared
        return error


def _call(case: Case, side: _Here) -> dict[str, list[Any]]:
    leaves: list[torch.Tensor] = []
    taken: dict[int, torch.Tensor] = {}

    def take(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in taken:
                made = taken[id(value)] = side.take(value.detach())
                if value.requires_grad:
                    leaves.append(made.detach().requires_grad_())
                    taken[id(value)] = leaves[-1]
            return taken[id(value)]
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return side.device()
        if type(value) in (list, tuple):
            return type(value)(map(take, value))
        if isinstance(value, dict):
            return {name: take(each) for name, each in value.items()}
        return value

    sample = case.sample
    first, args, kwargs = take(sample.input), take(sample.args), take(sample.kwargs)
    if "device" in kwargs or not taken:
        kwargs["device"] = side.device()
    shaped = {name: each for name, each in kwargs.items() if name != "device"}  # `out` already has the device
    operator: Any = case.operator
    torch.manual_seed(0)
    with torch.enable_grad():
        if case.form == "in place":
            if not _writable(sample.input):
                raise UserWarning("an operand that overlaps itself")
            result = operator.inplace_variant(first.clone(), *args, **kwargs)
        elif case.form == "out=":
            with torch.no_grad():
                made = operator.op(first, *args, **kwargs)
                out = (
                    tuple(torch.empty_like(each) for each in made)
                    if isinstance(made, tuple)
                    else torch.empty_like(made)
                )
                torch.manual_seed(0)
                result = [operator.op(first, *args, **shaped, out=out), out]
        else:
            result = operator.op(first, *args, **kwargs)
        found = {
            "result": [_fetched(each, side) for each in _flatten(result)],
            "operand": [_fetched(each, side) for each in taken.values()],
        }
        if case.form != "refused" and case.form != "out=" and leaves:
            shown = result if case.form == "in place" else sample.output_process_fn_grad(result)
            roots = [each for each in _flatten(shown) if isinstance(each, torch.Tensor) and each.requires_grad]
            if roots:
                torch.manual_seed(2)
                seeds = [side.take(torch.randn(each.shape).to(each.dtype)) for each in roots]
                found["gradient"] = [
                    _fetched(each, side)
                    for each in torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=False)
                ]
    return found


def _writable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flatten(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flatten(each)
    else:
        yield value


def _fetched(value: Any, side: _Here) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        raise Unstrided
    looks = (
        value.dtype,
        tuple(value.shape),
        tuple(value.stride()),
        value.is_conj(),
        value.is_neg(),
        value.requires_grad,
    )
    return looks, _bits(side.fetch(value.detach()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in which all NaN have the same bits."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _compare(here: dict[str, list[Any]], there: dict[str, list[Any]], values: bool) -> None:
    if here.keys() != there.keys():
        raise Differs(f"results {list(there)}, expected {list(here)}")
    rounded: Rounded | None = None
    for what, ours in here.items():
        theirs = there[what]
        if len(ours) != len(theirs):
            raise Differs(f"{what}: {len(theirs)} values, expected {len(ours)}")
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{what} {i}"
            if not (isinstance(a, tuple) and len(a) == 2 and isinstance(a[1], torch.Tensor)):
                if type(a) is not type(b) or not (a == b or (a != a and b != b)):
                    raise Differs(f"{where}: {b!r}, expected {a!r}")
                continue
            if not isinstance(b, tuple):
                raise Differs(f"{where}: {b!r}, expected a tensor")
            names = ("dtype", "shape", "strides", "is_conj", "is_neg", "requires_grad")
            for name, x, y in zip(names, a[0], b[0], strict=True):
                # The strides of a gradient are unspecified.
                if x != y and (what, name) != ("gradient", "strides"):
                    raise Differs(f"{where}: {name} is {y}, expected {x}")
            if values and not torch.equal(a[1], b[1]):
                try:
                    _assert_close(*(each[1].view(a[0][0]) for each in (b, a)))
                except AssertionError as error:
                    raise Differs(f"{where}: different values: {error}") from None
                rounded = rounded or Rounded(f"{where}: different rounding")
    if rounded is not None:
        raise rounded


def _assert_close(there: torch.Tensor, here: torch.Tensor) -> None:
    rtol, atol = default_tolerances(here.dtype)
    if here.dtype.itemsize == 2 and here.is_floating_point():  # terms are rounded before they are added
        atol = max(atol, rtol * float(here.nan_to_num().abs().max()))
        # Near the largest finite value, the intermediate results of one formula overflow, and those of another do not.
        almost = (there.abs() > torch.finfo(here.dtype).max / 2) & (there.sign() == here.sign())
        here = torch.where(here.isinf() & almost, there, here)
    torch.testing.assert_close(there, here, rtol=rtol, atol=atol, equal_nan=True)
