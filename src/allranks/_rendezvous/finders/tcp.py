"""``tcp://HOST:PORT``: rank 0 serves the store at this address."""

from __future__ import annotations

from allranks._cluster.env import is_master
from allranks._rendezvous.finders.env import find_by_env
from allranks._rendezvous.finders.interface import Finder, Method, Request
from allranks._rendezvous.finders.port import PortFinder

__all__ = ["TCP"]


def _make(request: Request) -> Finder:
    # tcp://$MASTER_ADDR:$MASTER_PORT means the same as env://. Under torchrun, its agent holds that port.
    if is_master(request.url.netloc, request.environ):
        return find_by_env(request)
    return PortFinder(request, request.read_job(by_env=False))


TCP = Method("tcp", "tcp://HOST:PORT", _make)
