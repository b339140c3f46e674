"""Wrong arguments of ``init_process_group`` raise before the call opens or waits for anything."""

from __future__ import annotations

from typing import Any

import pytest

import allranks
from allranks import UsageError


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"timeout": "3"}, "init_process_group: timeout must be a timedelta, a number of seconds or None, not '3'"),
        ({"timeout": float("nan")}, "timeout must be a timedelta or a number of seconds, not nan"),
        ({"timeout": 0}, "init_process_group: timeout must be positive, not 0"),
        ({"backend": 5}, "init_process_group: backend must be a string or None, not 5"),
        ({"init_method": 5}, "init_process_group: init_method must be a string or None, not 5"),
        ({"rank": "0"}, "init_process_group: rank must be a whole number, not '0'"),
        ({"world_size": 2.0}, "init_process_group: world_size must be a whole number, not 2.0"),
    ],
)
def test_arguments_of_wrong_type_raise_usage_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        allranks.init_process_group(**arguments)
    assert str(caught.value) == text
    assert not allranks.is_initialized()
