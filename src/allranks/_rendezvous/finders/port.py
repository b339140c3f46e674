"""Rank 0 serves the store on a TCP port that all ranks receive: ``tcp://``, or MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

from allranks._base.errors import ConfigError
from allranks._cluster.env import split_host_port
from allranks._net.secret import load_secret
from allranks._rendezvous.finders.interface import ServedFinder
from allranks._rendezvous.join_protocol import Member
from allranks._store import StoreServer

__all__ = ["PortFinder", "address_of"]


class PortFinder(ServedFinder):
    """Finder of a store at MASTER_ADDR and MASTER_PORT if the job has them, else at the address in the URL."""

    _host, _port = "", 0

    def open(self, me: Member) -> None:
        self._host, self._port = self.job.master or self._target(me)
        self.secret = load_secret(self.request.environ)
        self.where = f"rank 0 (the server at {self.locate()})"
        super().open(me)

    def serve(self) -> StoreServer:
        return StoreServer.tcp(self._host, self._port, self.secret)

    def locate(self) -> str:
        return address_of(self._host, self._port)

    def _target(self, me: Member) -> tuple[str, int]:
        host, port = split_host_port(self.request.url.netloc, "init_method")
        if port is None or (not host and me.rank):
            brackets = " An IPv6 address needs brackets: tcp://[::1]:29500." if ":" in host else ""
            raise ConfigError(
                f"init_method={self.request.init_method!r} is incomplete. Expected tcp://HOST:PORT.{brackets}"
            )
        return host, port


def address_of(host: str, port: int) -> str:
    """Return the address of a store at a TCP port."""
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
