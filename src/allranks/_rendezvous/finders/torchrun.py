"""``env://`` under torchrun, whose agent holds MASTER_PORT: the ranks meet on the agent's store."""

from __future__ import annotations

import importlib
import socket

from allranks._base.system import reason
from allranks._rendezvous.finders.interface import Finder, NotYet
from allranks._rendezvous.join_protocol import Member
from allranks._store import ForeignStore, PrefixStore, Store

__all__ = ["AgentFinder"]

_PROBE_S = 3.0  # seconds to check that the agent answers


class AgentFinder(Finder):
    """Finder of the store that torchrun's agent serves at MASTER_ADDR and MASTER_PORT."""

    advice = "Check that torchrun is still running there and that this host can reach it."

    def open(self, me: Member) -> None:
        super().open(me)
        host, port = self._address
        self.where = f"the store of torchrun's agent at {host}:{port}"

    @property
    def _address(self) -> tuple[str, int]:
        assert self.job.master is not None
        return self.job.master

    def find(self) -> Store:
        host, port = self._address
        left_s = self.request.left_s
        try:
            # torch's client retries for a long time and fills stderr while it does. It is therefore used only after the
            # agent answers.
            socket.create_connection((host, port), min(max(left_s(), 0.01), _PROBE_S)).close()
            # Imported by name, because a static import would load torch in the launcher.
            connect = importlib.import_module("allranks._engines.torchrun").connect
            store = connect(host, port, max(left_s(), 1.0), self.request.timeout_s)
        except (OSError, RuntimeError, UnicodeError) as error:
            raise NotYet(reason(error).partition("\n")[0]) from error
        # The keys outlive the ranks. Ranks that the agent restarts must not meet the ranks that failed.
        return PrefixStore(self.job.agent, ForeignStore(store))
