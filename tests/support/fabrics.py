"""Tests of libfabric: whether it is installed, and which network a group has selected."""

from __future__ import annotations

import ctypes
import logging
import os

import pytest

__all__ = ["FabricLog", "needs_libfabric"]


def _is_installed() -> bool:
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError:
        return False
    return True


needs_libfabric = pytest.mark.skipif(
    os.environ.get("ALLRANKS_TEST_ALL") != "1" and not _is_installed(), reason="libfabric is not installed"
)


class FabricLog(logging.Handler):
    """Collects what this process logs about fabrics, from its creation on."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        log = logging.getLogger("allranks")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "fabric" in (text := record.getMessage()):
            self.texts.append(text)

    def used(self) -> list[str]:
        """Return the providers that groups have selected."""
        return [text.split("'")[3] for text in self.texts if text.endswith("connects the hosts")]
