"""The key-value store where ranks meet: small values, blocking reads, nothing polled.

A store is for meeting (addresses, counters, verdicts), not for bulk data. Why not torch's TCPStore: it has no
authentication, opens a TCP port even on one host, hangs when something else answers on its port, and needs
torch, which the launcher must not import. Who listens where, and what the keys mean, is ``_rendezvous``'s
business; what a secret may be handed over by is the launcher's.

The map, from pure to worldly, so that each layer can be tested alone:

- ``wire``    requests and replies: bytes in, bytes out
- ``table``   ``KeyTable``: the values, and who waits for which; time comes in as an argument
- ``stores``  ``Store`` and the kinds without a connection: ``HashStore``, ``PrefixStore``, ``ForeignStore``
- ``client``  ``StoreClient``: the kind that asks a server
- ``address`` where a server listens that was given a host name
- ``server``  ``StoreServer``: one thread, one selector, any number of clients
- ``tcp``     ``TCPStore``: server and client as torch's users know them
- ``file``    ``FileStore``: a log in a file, under its lock

Frames, the handshake, admission and TLS are in ``_net``. On TCP both sides prove that they know the secret; on a unix
socket the kernel vouches for the peer's user, and the secret may be empty. Without TLS nothing is encrypted.
"""

from __future__ import annotations

from allranks._base.errors import SecretError, StoreLostError
from allranks._base.public import publish
from allranks._store.client import StoreClient
from allranks._store.file import FileStore
from allranks._store.server import StoreServer
from allranks._store.stores import ForeignStore, HashStore, PrefixStore, Store
from allranks._store.tcp import TCPStore
from allranks._store.wire import FRAME_LIMIT

__all__ = [
    "FRAME_LIMIT",
    "FileStore",
    "ForeignStore",
    "HashStore",
    "PrefixStore",
    "SecretError",
    "Store",
    "StoreClient",
    "StoreLostError",
    "StoreServer",
    "TCPStore",
]


publish(globals())
