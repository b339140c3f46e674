"""``store=``: the ranks meet on a store that the program created, of allranks or with torch's methods.

A handler of ``register_rendezvous_handler`` creates such a store from a URL.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlunsplit

from allranks._base.errors import UsageError
from allranks._cluster.env import JobEnv, read_env
from allranks._rendezvous.finders.interface import Finder, Request
from allranks._store import ForeignStore, Store

__all__ = ["GivenStoreFinder", "Handler", "HandlerFinder"]


_handler_stores: dict[str, Any] = {}
"""The store of the last rendezvous, by scheme. The other ranks may still need a server in it after this rank joined."""


class Handler(Protocol):
    """Creates a store from a URL."""

    def __call__(self, url: str, *, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        """Yield the store, the rank and the world size, once."""


class GivenStoreFinder(Finder):
    """Finder of a store that outlives the rendezvous. It stays open."""

    advice = "Check that its server is running."

    def __init__(self, request: Request, job: JobEnv, store: object, where: str) -> None:
        super().__init__(request, job)
        self.where = where
        self._store = store if isinstance(store, Store) else ForeignStore(store)

    def find(self) -> Store:
        return self._store


class HandlerFinder(GivenStoreFinder):
    """Finder of the store that a handler yields. Closing it after the rendezvous runs the handler's ``finally``."""

    def __init__(self, request: Request, handler: Handler) -> None:
        scheme = request.url.scheme
        self._steps = handler(_with_numbers(request), timeout=timedelta(seconds=request.timeout_s))
        given = next(self._steps, None) if isinstance(self._steps, Iterator) else self._steps
        match given:
            case (store, int(rank), int(world_size)):
                pass
            case _:
                raise UsageError(
                    f"init_method={request.init_method!r}: the handler of {scheme}:// returned {given!r}. Expected a "
                    "generator that yields (store, rank, world_size)."
                )
        job = read_env(rank, world_size, request.environ, by_env=False)
        super().__init__(request, job, store, f"the store of {scheme}://")
        _handler_stores[scheme] = store

    def close(self, linger_s: float) -> None:
        super().close(linger_s)
        if isinstance(self._steps, Generator):
            self._steps.close()


def _with_numbers(request: Request) -> str:
    """Return the URL, with the rank and the world size if the caller passed them, as torch's handlers expect them."""
    query = dict(parse_qsl(request.url.query, keep_blank_values=True))
    given = {"rank": request.rank, "world_size": request.world_size}
    query |= {name: str(number) for name, number in given.items() if number != -1}
    return urlunsplit(request.url._replace(query=urlencode(query)))
