"""Functions pickled by value keep the file name of their source, and so do the functions nested in them."""

import traceback
from collections.abc import Callable

import cloudpickle

from allranks._base import pickling


def test_unpickled_function_keeps_its_file_name() -> None:
    def fails() -> None:
        def inside(divisor: int) -> float:
            return 1 / divisor

        inside(0)

    made: Callable[[], None] = cloudpickle.loads(pickling.dumps(fails))
    assert made.__code__ is not fails.__code__
    try:
        made()
    except ZeroDivisionError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
    assert [(frame.filename, frame.name) for frame in frames] == [(__file__, "fails"), (__file__, "inside")]
    assert frames[1].line == "return 1 / divisor"
