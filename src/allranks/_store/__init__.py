"""The key-value store of the rendezvous: small values and blocking reads, without polling of the server.

Ranks exchange addresses, counters and verdicts through a store, but no bulk data. torch's TCPStore is not used for
four reasons. It has no authentication. It opens a TCP port even on one host. It hangs if another program answers on its
port. It needs torch, which the launcher must not import. ``_rendezvous`` defines which process listens where, and what
the keys mean. The launcher defines how a secret is passed on.

The layers, from pure functions to input and output, so that each can be tested alone:

- ``wire``    requests and replies: bytes in, bytes out
- ``table``   ``KeyTable``: the values, and the clients that wait for keys; the time is an argument
- ``stores``  ``Store`` and the stores without a connection: ``HashStore``, ``PrefixStore``, ``ForeignStore``
- ``client``  ``StoreClient``: a store that sends its requests to a server
- ``address`` the addresses on which a server listens if it receives a host name
- ``server``  ``StoreServer``: one thread, one selector, any number of clients
- ``tcp``     ``TCPStore``: server and client with the interface of torch's TCPStore
- ``file``    ``FileStore``: a log in a file, protected by the lock of the file

Frames, the handshake, admission and TLS are in ``_net``. On TCP both sides prove that they have the secret. On a unix
socket the kernel reports the user of the peer, and the secret may be empty. Without TLS, connections are not encrypted.
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
