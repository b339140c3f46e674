"""``env://`` under ``allranks run``: the ranks meet on the launcher's store."""

from __future__ import annotations

from allranks._net.secret import load_secret
from allranks._rendezvous.finders.interface import Finder
from allranks._rendezvous.join_protocol import Member
from allranks._store import Store

__all__ = ["LauncherFinder"]


class LauncherFinder(Finder):
    """Finder of the launcher's store, whose address is in the environment."""

    advice = "Check that the launcher is running and that this host can reach it."
    _secret = b""

    def open(self, me: Member) -> None:
        super().open(me)
        self.where = f"the launcher's store at {self.job.store}"
        if not self.job.store.startswith("unix:"):
            self._secret = load_secret(self.request.environ)

    def find(self) -> Store:
        return self.dial(self.job.store, self._secret)
