"""Rendezvous of the ranks of a job: from ``init_method`` to a store that all ranks share.

A rendezvous method (``finders``) provides one store that all ranks reach. Either this store outlives the rendezvous, as
a launcher's or a user's store does, or rank 0 serves it for this rendezvous only. The ranks register on it, and each
gets the same verdict. The verdict states that all ranks have joined, or which ranks are missing, doubled or disagree.
``join_protocol`` defines the requests as a state machine, which this file connects with the system. ``_api.world`` then
uses the store for channels and groups.

A process may join, leave and join again. On a store that outlives the rendezvous, each process counts its own joins,
and the count is part of the rendezvous's keys. A store that rank 0 serves is new each time. A rank that finds its own
earlier join there has reached the server of the previous rendezvous, and tries again.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping, MutableMapping
from urllib.parse import parse_qs, urlsplit

from allranks._base.errors import ConfigError, JoinError, StoreLostError, TimeoutError, UsageError
from allranks._base.system import reason, refusals
from allranks._cluster.env import read_int
from allranks._cluster.network import machine, published_addresses
from allranks._cluster.outer_job import leave_outer_job
from allranks._rendezvous import finders
from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import Finder, NotYet, Request, notify
from allranks._rendezvous.finders.store import GivenStoreFinder
from allranks._rendezvous.join_protocol import (
    GRACE_S,
    NOTICE_S,
    Act,
    Answer,
    Connect,
    JoinProtocol,
    Leave,
    Lost,
    Member,
    Notify,
    Pause,
)
from allranks._rendezvous.meeting import JobMeeting
from allranks._store import HashStore, PrefixStore, Store

__all__ = ["JobMeeting", "Member", "find_method", "join", "this_member"]

_NOTICE_S = NOTICE_S  # a module variable, because tests shorten it
_PROCESS = uuid.uuid4().hex  # together with the pid, unique among all processes in all containers; the pid alone is not


def this_member(rank: int, world_size: int) -> Member:
    """Return the description of this process for the other ranks."""
    with refusals(f"rank {rank} cannot determine its host"):
        addresses = published_addresses() if world_size > 1 else ()
        return Member(rank, os.getpid(), socket.gethostname(), machine(), world_size, addresses)


def join(
    init_method: str | None,
    *,
    rank: int = -1,
    world_size: int = -1,
    timeout_s: float,
    store: object | None = None,
    environ: Mapping[str, str] = os.environ,
) -> JobMeeting:
    """Join the rendezvous with the other ranks of the job.

    Args:
        init_method: ``env://`` (also if None), ``tcp://host:port``, ``file:///path``, or a URL of a registered handler.
            All except the first may end in ``?rank=0&world_size=2``.
        rank: The rank of this process. -1: from the URL or the environment.
        world_size: The number of processes. -1: from the URL or the environment.
        timeout_s: Seconds to wait for the other ranks.
        store: A store to use instead of ``init_method``: allranks's, or one with torch's methods. It stays open.
        environ: The environment.

    Returns:
        The rendezvous. The caller must close it.

    Raises:
        ConfigError: A setting is missing or wrong, a port is taken, or the secrets differ.
        JoinError: Ranks are missing when the timeout expires, or two ranks disagree on rank or world size.
    """
    if store is not None and init_method is not None:
        raise UsageError(f"init_method={init_method!r} and store= are both set. Expected only one of them.")
    # First: variables of an outer job must not determine the rank.
    if isinstance(environ, MutableMapping):
        leave_outer_job(environ, rank, world_size)
    began = time.monotonic()
    finder = _finder(init_method, rank, world_size, began + timeout_s, timeout_s, store, environ)
    job = finder.job
    me = this_member(job.rank, job.world_size)
    if job.world_size == 1:
        finder.close(0.0)
        return JobMeeting(0, 1, HashStore(), me, finder, "allranks/alone", timeout_s, environ, (0, 1))
    try:
        finder.open(me)
        shared = _join(finder, me, began)
    except BaseException as error:
        # After a JoinError, the server stays open for a moment, so that the other ranks can read the verdict.
        finder.close(GRACE_S if isinstance(error, JoinError) else 0.0)
        raise
    local = (job.local_rank, job.local_world_size)
    return JobMeeting(me.rank, me.world_size, shared, me, finder, shared.prefix, timeout_s, environ, local)


def find_method(init_method: str | None, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Finder:
    """Return the rendezvous method of an ``init_method`` whose rank and world size are in the environment."""
    return _finder(init_method, -1, -1, time.monotonic() + timeout_s, timeout_s, None, environ)


def _finder(
    init_method: str | None,
    rank: int,
    world_size: int,
    deadline: float,
    timeout_s: float,
    store: object | None,
    environ: Mapping[str, str],
) -> Finder:
    text = init_method or "env://"
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"init_method={text!r} is not a URL ({error}). Expected one of {finders.forms()}.") from None
    method = finders.method_of(url.scheme, text)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _argument_or_query(rank, query, "rank", 0)
    world_size = _argument_or_query(world_size, query, "world_size", 1)
    request = Request(text, url, rank, world_size, timeout_s, deadline, environ)
    if store is not None:
        return GivenStoreFinder(request, request.read_job(by_env=False), store, "the store passed as store=")
    return method.make(request)


def _join(finder: Finder, me: Member, began: float) -> PrefixStore:
    """Join the other ranks on the store of a finder. Return a view with the keys of this rendezvous."""
    protocol = JoinProtocol(
        me,
        f"{_PROCESS}.{me.pid}",
        began,
        finder.request.timeout_s,
        finder.where,
        finder.advice,
        fresh=finder.fresh,
        notice_s=_NOTICE_S,
        started=finder.started,
    )
    if finder.server is not None:
        protocol.listens = finder.server.describe_address
        protocol.refusals = finder.server.refusals.values
    stores: list[Store] = []

    def perform(act: Act) -> Answer:
        match act:
            case Pause(seconds):
                time.sleep(max(seconds, 0.0))
            case Notify(line):
                notify(line)
            case Leave():
                finder.disconnect()
            case Connect():
                try:
                    stores[:] = [finder.find()]
                except NotYet as error:
                    return Lost(str(error), error)
                except (StoreLostError, TimeoutError) as error:
                    return _lost(error)
            case request:
                try:
                    return stores[0]._execute(request)
                except (StoreLostError, TimeoutError) as error:
                    return _lost(error)
        return None

    prefix = drive(protocol.steps(), perform)
    finder.finish()
    return PrefixStore(prefix, stores[0])


def _lost(error: StoreLostError | TimeoutError) -> Lost:
    # The message of the client is about one attempt ("did not answer for 0.0 s"), so the error of the rendezvous refers
    # to the error of the system instead.
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return Lost(reason(cause), cause)


def _argument_or_query(value: int, query: Mapping[str, str], name: str, low: int) -> int:
    found = read_int(query, name, low) if value == -1 else value
    return -1 if found is None else found
