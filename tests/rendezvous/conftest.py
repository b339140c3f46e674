"""Remove rendezvous handlers that another test or an example has registered in this process."""

import pytest

from allranks._rendezvous import finders


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "_registered", {})
