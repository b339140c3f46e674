"""A process of tests keeps no rendezvous method that another test, or an example, has registered."""

import pytest

from allranks._rendezvous import finders


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "_registered", {})
