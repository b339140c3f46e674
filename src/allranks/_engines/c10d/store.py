"""The store for torch's backends: they exchange their addresses on it, and no TCPStore is opened.

Each group has its own server, which rank 0 of the group holds. No other store therefore has to outlive
``init_process_group``. The server uses a unix socket if all members share a host, and otherwise a TCP port with a
secret. The world has a server, too, for torch's default group. It does not run before rank 0 has created this group.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from allranks._base.errors import JoinError, StoreLostError, TimeoutError
from allranks._base.forks import follow, forks
from allranks._cluster.network import nearest_first
from allranks._engines.spec import RECORD_BYTES, Exchange
from allranks._store import Store, StoreClient, StoreServer

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["GroupStore"]

# A record: the port of rank 0's server, and its secret. For a unix socket (port 0), its random name instead of the
# secret, because the kernel authenticates the user.
_RECORD = struct.Struct(f"!H{RECORD_BYTES - 2}s")
_UNIX = "unix:@allranks-"
_NAME_BYTES = 16
_TRY_S = 5.0  # seconds for one of several addresses
_CONNECTED = "allranks/connected/"  # prefix of a key that ends with a rank


class GroupStore(TorchStore):
    """The store of a group, with the methods that torch's C++ code calls. It connects on the first call of one of them.

    Attributes:
        record: The record of rank 0 that the members need. Rank 0 has it from the beginning. On other ranks, the caller
            sets it.
    """

    def __init__(self, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        """Create the store. On rank 0, it also listens."""
        super().__init__()
        self._members = members
        self._timeout_s = timeout_s
        self._server: StoreServer | None = None
        self._connected: StoreClient | None = None
        self._forks = forks()
        # Creates the lock. `follow` calls the same method in each forked child.
        self.abandon()
        follow(self)
        self.record = b""
        if rank == 0:
            if len({member.machine for member in members}) == 1:
                self._server = StoreServer.unix()
                self.record = _RECORD.pack(0, bytes.fromhex(self._server.address.removeprefix(_UNIX)))
            else:
                # A TCP port can be reached by any process, so the clients must prove this secret.
                secret = os.urandom(RECORD_BYTES - 2)
                self._server = StoreServer.tcp("", 0, secret)
                self.record = _RECORD.pack(self._server.port, secret)

    def abandon(self) -> None:
        """Replace the lock. In a forked child, a thread of the parent may hold the old one."""
        self._lock = threading.Lock()

    @classmethod
    def among(cls, rank: int, members: Sequence[Member], exchange: Exchange, timeout_s: float) -> GroupStore:
        """Return a store that is served and to which this rank is connected. All members call this."""
        store = cls(rank, members, timeout_s)
        try:
            # Rank 0 listens before its record is sent, and serves after it. Early connections wait in the kernel's
            # backlog.
            store.record = exchange(store.record or bytes(RECORD_BYTES))[0]
            store.serve()
            # This rank is connected. Rank 0 waits for these keys of all ranks when it leaves (`close`).
            store.set(f"{_CONNECTED}{rank}", b"")
        except BaseException:
            store.close()
            raise
        return store

    @property
    def secret(self) -> bytes:
        """Random bytes that the members of the group share."""
        secret: bytes = _RECORD.unpack(self.record)[1]
        return secret

    def serve(self) -> None:
        """Start serving on rank 0. A forked child of rank 0 does not serve."""
        if self._server is not None and self._forks == forks():
            self._server.start()

    @property
    def _client(self) -> Store:
        # Several threads may make the first request. Only one of them connects.
        with self._lock:
            if self._connected is None:
                port, secret = _RECORD.unpack(self.record)
                if port:
                    self._connected = self._reach(self._members[0], port)
                else:
                    address = _UNIX + secret[:_NAME_BYTES].hex()
                    self._connected = StoreClient.connect(address, timeout_s=self._timeout_s)
            return self._connected

    def _reach(self, first: Member, port: int) -> StoreClient:
        if self._server is not None:
            return StoreClient.connect(self._server.here, self.secret, self._timeout_s)
        # The host name of rank 0 may resolve to an unreachable address, so the published addresses are tried first.
        for address in nearest_first(first.addresses):
            target = f"tcp:[{address}]:{port}" if ":" in address else f"tcp:{address}:{port}"
            with contextlib.suppress(JoinError):
                # One attempt only: an address that does not answer must not use up the time of the others.
                client = StoreClient.connect(target, self.secret, _TRY_S, retry=False)
                # The attempt's limit applied to the connection only. Requests may wait for the whole timeout.
                client.timeout_s = self._timeout_s
                return client
        return StoreClient.connect(f"tcp:{first.host}:{port}", self.secret, self._timeout_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection of this rank, and on rank 0 the server.

        Args:
            linger_s: Seconds for which rank 0 waits for ranks that are about to connect (``among``).
        """
        if self._connected is not None:
            # A forked child of rank 0 does not serve, so it has no rank to wait for.
            if linger_s and self._server is not None and self._forks == forks():
                # A rank was lost while it connected, or the store is already closed.
                with contextlib.suppress(TimeoutError, StoreLostError):
                    keys = [f"{_CONNECTED}{rank}" for rank in range(len(self._members))]
                    self._connected.wait(keys, timedelta(seconds=linger_s))
            self._connected.close()
        if self._server is not None:
            self._server.close()

    def set(self, key: str, value: bytes | str) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        return self._client.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._client.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._client.multi_set(keys, values)

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._client.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._client.wait(keys, timeout)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._client.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._client.delete_key(key)
