"""torch's operator database on a worker, with a list of known deviations.

By default, the test tries the first sample of each form of each operator in float32, forward and backward. The first
command below tries all samples in all dtypes, which takes about one hour on one core; the second one selects dtypes:

    ALLRANKS_TEST_OPS=all python -m pytest tests/remote/test_ops.py
    ALLRANKS_TEST_OPS=float32,int64 python -m pytest tests/remote/test_ops.py
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from operators import DTYPES, ERROR, PASS, ROUNDED, UNDEFINED, WORKER, database, judge_operator
from torch.utils._pytree import tree_leaves, tree_map

from allranks.remote.master.master import Master

_ASKED = os.environ.get("ALLRANKS_TEST_OPS", "")
_BY_NAME = {str(each).removeprefix("torch."): each for each in DTYPES}
_TRIED = [_BY_NAME[each] for each in _ASKED.split(",")] if _ASKED not in ("", "all") else list(DTYPES)


class Known(NamedTuple):
    """An operator that does not always pass: its worst known verdict, a dtype that shows it, and the reason.

    `shows` is None if the deviation occurs only on some machines or only in some runs.
    """

    worst: str
    shows: torch.dtype | None
    why: str


_FORMULA = "torch uses another formula for subclasses of tensors, because the formula for the CPU depends on the data"
_ADDRESS = "MKL's sums depend on the address at which memory begins"
KNOWN = {
    "masked_fill": Known(ROUNDED, torch.float32, _FORMULA),
    "masked_prod": Known(ROUNDED, torch.float32, _FORMULA),
    "prod": Known(ROUNDED, torch.float32, _FORMULA),
    "cumprod": Known(ROUNDED, torch.complex64, _FORMULA),
    "matmul": Known(ROUNDED, None, _ADDRESS),
    "linalg_lstsq": Known(ROUNDED, None, _ADDRESS),
    "linalg_lstsq_grad_oriented": Known(ROUNDED, None, _ADDRESS),
}
_FROM_GOOD_TO_BAD = (PASS, UNDEFINED, ROUNDED, ERROR)


def _badness(kind: str) -> int:
    return _FROM_GOOD_TO_BAD.index(kind) if kind in _FROM_GOOD_TO_BAD else len(_FROM_GOOD_TO_BAD)


@pytest.mark.timeout(0 if _ASKED else 600)  # 45 s on one core; the test may get only a fifth of a core
@pytest.mark.parametrize("dtype", _TRIED if _ASKED else [torch.float32], ids=str)
def test_operators_match_the_cpu_except_for_known_deviations(
    mw: Master, as_many_threads: None, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    counts: Counter[str] = Counter()
    worse: list[str] = []
    imperfect: set[str] = set()
    operators = [each for each in database() if dtype in each.supported_dtypes("cpu")]
    for operator in operators:
        name = operator.formatted_name
        worst = _badness(KNOWN[name].worst) if name in KNOWN else _badness(UNDEFINED)
        for case, verdict in judge_operator(operator, dtype, None if _ASKED else 1):
            counts[verdict.kind] += 1
            if _badness(verdict.kind) > _badness(UNDEFINED):
                imperfect.add(name)
            if _badness(verdict.kind) > worst:
                worse.append(f"{case}: {verdict.kind}: {verdict.why}")
        mw.synchronize()
    with capsys.disabled():
        print(f"\n{dtype}, {len(operators)} operators: {dict(counts)}; not perfect: {sorted(imperfect)}")
    assert not worse, "\n".join(worse)
    gone = [name for name, known in KNOWN.items() if known.shows is dtype and name not in imperfect]
    assert not _ASKED or not gone, f"these operators now pass: remove them from KNOWN: {gone}"


_CHECKED_LATE = {"cauchy", "exponential", "geometric", "log_normal", "uniform"}
"""Random operators whose arguments only the worker checks once the call is known: the tensor is poisoned."""

_CHECKED_LATE_AT_TIMES = {"scatter", "scatter_add"}
"""The same for operators of which the worker already knows another call. That depends on earlier tests."""


@pytest.mark.timeout(300)  # 30 s of one core
def test_wrong_input_is_an_error_after_a_correct_call(mw: Master) -> None:
    """Call operators with wrong input after correct calls.

    After correct calls, the master no longer waits for the worker. An error may be raised late, but must not be lost.
    A failed call must not change its operands, except for the listed operators, which poison the tensor.
    """
    silent, lost = [], set()
    for operator in database():
        if operator.error_inputs_func is None:
            continue
        dtypes = operator.supported_dtypes("cpu")
        dtype = torch.float32 if torch.float32 in dtypes else next(iter(dtypes))
        for sample in islice(operator.sample_inputs("cpu", dtype), 3):
            for _ in range(2):
                _fails(operator, _moved(sample, WORKER))
        for number, wrong in enumerate(operator.error_inputs("cpu")):
            operands = _leaves(_moved(wrong.sample_input, None))
            if any(each.layout != torch.strided or each.device.type != "cpu" for each in operands):
                continue
            for form in (operator, operator.inplace_variant):
                if form is None or not _fails(form, _moved(wrong.sample_input, None)):
                    continue
                call = _moved(wrong.sample_input, WORKER)
                if not _fails(form, call):
                    silent.append(f"{operator.full_name} #{number}")
                if _fails(lambda *each: list(each), (_leaves(call), (), {})):
                    lost.add(operator.name)
    assert silent == []
    assert lost - _CHECKED_LATE_AT_TIMES == _CHECKED_LATE


def _moved(sample: Any, device: str | None) -> tuple[Any, Any, Any]:
    """Return copies of the arguments of a call, on a device."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        return value.detach().clone() if device is None else value.detach().to(device)

    return tree_map(move, (sample.input, sample.args, sample.kwargs))


def _leaves(call: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(call) if isinstance(each, torch.Tensor)]


def _fails(function: Any, call: tuple[Any, Any, Any]) -> bool:
    """Return whether a call, or fetching its results, raises an error."""
    first, others, named = call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for each in _leaves(function(first, *others, **named)):
                each.cpu()
        except Exception:  # noqa: BLE001 - the type of the exception does not matter
            return True
    return False
