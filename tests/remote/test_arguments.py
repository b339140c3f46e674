"""The grammar of the arguments of a call.

The worker reads the forms that the master writes. The fast path in C++ creates the same keys as Python.
"""

import struct
from typing import Any

import pytest
import torch

from allranks import _core
from allranks.remote.master.master import Master
from allranks.remote.protocol import arguments
from allranks.remote.protocol.arguments import constant_of, form_of, number_codes, packed_as, visit, written_by
from allranks.remote.torch_device import call_site, dispatch, handle, tensor

aten = torch.ops.aten
HERE = torch.device("cpu")


class Read:
    """Read a form with the numbers and tensors of a call, as a worker does."""

    def __init__(self, *given: Any) -> None:
        self.given = iter(given)

    def tensor(self) -> Any:
        return next(self.given)

    def number(self, code: str) -> Any:
        return next(self.given)

    def sequence(self, parts: list[Any]) -> Any:
        return parts

    def constant(self, form: list[Any]) -> Any:
        return constant_of(form, HERE)


CONSTANTS = [
    None, True, False, 3, -1, 1 << 70, 2.5, float("inf"), "mean", 1 + 2j, torch.float16, torch.channels_last,
    torch.strided, [1, [True, None], "a"], [],
]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constant_keeps_its_value_and_type_through_a_form(value: Any) -> None:
    found = visit(form_of(value), Read())
    assert found == value
    assert type(found) is type(value)


def test_device_argument_becomes_the_device_of_the_worker() -> None:
    assert visit(form_of(torch.device("lazy", 3)), Read()) == HERE


def test_form_has_ordered_gaps_for_numbers_and_tensors() -> None:
    x = torch.ones(2)
    form = form_of([x, 3, [2.5, None], torch.Generator()], is_number=True, floats_matter=False)
    assert form == ["l", ["t"], ["i"], ["l", ["f"], ["c", None]], ["g"]]
    assert visit(form, Read(x, 4, 0.5, 7)) == [x, 4, [0.5, None], 7]
    assert number_codes([form]) == packed_as([4, 0.5, 7]) == "qdq"


@pytest.mark.parametrize(("value", "is_number"), [(1 << 63, True), (-(1 << 63) - 1, True), (3, False)])
def test_integers_beyond_64_bits_and_fixed_integers_are_constants(value: int, is_number: bool) -> None:
    assert form_of(value, is_number) == ["c", value]


def test_unsupported_argument_type_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be an argument of an operation on a worker"):
        form_of([object()])


def test_written_by_returns_the_tensors_that_a_call_changes() -> None:
    pair = ["l", ["t"], ["t"]]
    assert written_by(aten.add.Tensor, [["t"], ["t"]], {"alpha": ["i"]}) == []
    assert written_by(aten._foreach_add_.List, [pair, pair], {}) == [0, 1]
    assert written_by(aten.add.out, [["t"], ["t"]], {"out": ["t"]}) == [2]
    assert written_by("allranks::all_reduce", [pair, ["i"], ["c", "SUM"]], {}) == [0, 1]
    assert written_by("allranks::send", [pair, ["i"], ["c", 1]], {}) == []


def calls_of(x: Any, y: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    return [
        (aten.add.Tensor, (x, y), {"alpha": 2}),
        (aten.add.Tensor, (x, 2.5), {}),
        (aten.add.Tensor, (x, True), {}),
        (aten.clamp.default, (x, None, 3), {}),
        (aten.sum.dim_IntList, (x, [0], True), {"dtype": torch.float64}),
        (aten._foreach_mul.Scalar, ([x, y], 0.5), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
        (aten.cat.default, ((x, y), 0), {}),
        (aten.reshape.default, (x, torch.Size([2, 2])), {}),
    ]


@pytest.mark.parametrize("which", range(10))
def test_python_and_the_fast_path_find_the_same_cached_calls(mw: Master, which: int) -> None:
    x, y = torch.ones(4, device="worker:1"), torch.full((4,), 2.0, device="worker:1")
    op, args, kwargs = calls_of(x, y)[which]
    for _ in range(3):  # the worker infers the results of the first call; a later call is predicted, then cached
        expected = op(*args, **kwargs)
    known = len(x._place.calls)  # type: ignore[attr-defined]
    found = dispatch.run(op, args, kwargs)
    assert len(x._place.calls) == known  # type: ignore[attr-defined]
    for one, other in zip(*[each if isinstance(each, list) else [each] for each in (found, expected)], strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_fast_path_refuses_a_different_number_format() -> None:
    numbers = {**arguments.NUMBERS, arguments.INTEGER: "i"}
    assert struct.calcsize("i") != struct.calcsize("q")
    with pytest.raises(ValueError, match="integers are packed as q and floats as d"):
        _core.set_handles(
            tensor.RemoteTensor, handle.DeviceTarget, torch.Tensor._make_wrapper_subclass, call_site.here,
            dispatch.dispatch, torch.is_inference_mode_enabled, dispatch.MARKS, {},
            (arguments.LIST, arguments.INTEGER, arguments.FLOAT), numbers,
        )  # fmt: skip
