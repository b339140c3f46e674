"""``file:///PATH``: rank 0 serves the store on a unix socket and writes its address to the file.

A rank of another host requests a TCP port by creating a second file next to the first. A job on one host opens no port.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec

from allranks._base.errors import ConfigError
from allranks._base.files import read_bytes
from allranks._base.system import reason
from allranks._base.threads import Daemon
from allranks._cluster.env import JobEnv
from allranks._rendezvous.finders.endpoint import Endpoint
from allranks._rendezvous.finders.interface import Finder, Method, NotYet, Request, ServedFinder, notify
from allranks._rendezvous.join_protocol import Member
from allranks._store import StoreServer

__all__ = ["FILE"]

_WRITABLE = "Choose a file in a folder to which all ranks can write."
_POLL_S = 0.1  # seconds between two checks for the request of another host


class FileFinder(ServedFinder):
    """Finder of the server whose address is in a file."""

    _path: Path

    def __init__(self, request: Request, job: JobEnv) -> None:
        super().__init__(request, job)
        self._attempts = itertools.count()
        self._written: Path | None = None
        self._had_empty_file = False
        self._watcher: threading.Thread | None = None
        self._request_file: Path | None = None
        self._stop = threading.Event()

    def open(self, me: Member) -> None:
        path = self._path = _path_of(self.request)
        if not path.parent.is_dir() or (path.exists() and not path.is_file()):
            why = "it is not a file" if path.exists() else "its folder does not exist"
            raise ConfigError(f"file://{path}: {why}. Expected a new file in an existing folder.")
        self.where = f"rank 0 (the server named in {path})"
        token = secrets.token_hex(32)
        self.secret = token.encode()
        super().open(me)
        if self.server is not None:
            endpoint = Endpoint(self.server.address, token, me.host, me.machine)
            self._write(endpoint)
            # A thread, because rank 0 is busy joining while ranks of other hosts search.
            self._watcher = Daemon(target=self._await_other_hosts, args=(self.server, endpoint))
            self._watcher.start()

    def serve(self) -> StoreServer:
        return StoreServer.unix(self.secret)

    def locate(self) -> str:
        path = self._path
        try:
            endpoint = msgspec.json.decode(read_bytes(path), type=Endpoint)
            if endpoint.machine != self.me.machine and not endpoint.far and not endpoint.trouble:
                # The name contains a part of the token, so a file of an earlier rendezvous requests nothing.
                _request_for_port(path, endpoint.token).touch(0o600)
                raise NotYet(f"rank 0, on host {endpoint.host}, does not listen for other hosts yet")
        except FileNotFoundError:
            raise NotYet("the file does not exist") from None
        except msgspec.MsgspecError:
            raise NotYet("the file names no server") from None
        except OSError as error:
            raise ConfigError(
                f"file://{path}: cannot read the file or write to its folder: {reason(error)}.\n  {_WRITABLE}"
            ) from None
        if endpoint.trouble:
            raise NotYet(endpoint.trouble)
        self.secret = endpoint.token.encode()
        return endpoint.address_for(self.me, next(self._attempts))

    def finish(self) -> None:
        super().finish()
        self._remove()

    def close(self, linger_s: float) -> None:
        self._remove()
        super().close(linger_s)

    def _await_other_hosts(self, server: StoreServer, endpoint: Endpoint) -> None:
        self._request_file = _request_for_port(self._path, endpoint.token)
        while not self._stop.wait(_POLL_S):
            try:
                # The folder is listed, because over NFS the lookup of a name that was missing a moment ago is cached.
                if self._request_file.name not in os.listdir(self._path.parent):
                    continue
            except OSError:  # a network file system can be unavailable for a moment
                continue
            try:
                answer = msgspec.structs.replace(endpoint, far=tuple(server.listen_to_other_hosts()))
            except ConfigError as error:
                # The searching ranks show it within one line.
                answer = msgspec.structs.replace(endpoint, trouble=f"rank 0: {error}".replace("\n  ", " "))
            try:
                self._write(answer)
            except ConfigError as error:
                notify(f"allranks: {self.me}: ranks of other hosts cannot get its address: {error}")
            return

    def _write(self, endpoint: Endpoint) -> None:
        path = self._path
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            if self._written is None:
                self._had_empty_file = path.exists() and path.stat().st_size == 0
            # Only this user may read the file, because it contains the secret of the store.
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(endpoint))
            # A rename, so that a searching rank never reads an incomplete record.
            self._written = draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(f"file://{path}: cannot be written: {reason(error)}.\n  {_WRITABLE}") from None

    def _remove(self) -> None:
        self._stop.set()
        if self._watcher is not None:
            # Before the files are removed: otherwise the thread could write one of them again.
            self._watcher.join()
        if self._request_file is not None:
            self._request_file.unlink(missing_ok=True)
        path, self._written = self._written, None
        if path is None or self.server is None:
            return
        with suppress(FileNotFoundError):
            # A later rendezvous may have replaced the file.
            if self.server.address.encode() not in path.read_bytes():
                return
            # The file was empty, for example created by tempfile. Its owner expects it to exist afterwards, so it is
            # not deleted.
            if self._had_empty_file:
                os.truncate(path, 0)
            else:
                path.unlink()


def _make(request: Request) -> Finder:
    return FileFinder(request, request.read_job(by_env=False))


def _path_of(request: Request) -> Path:
    url = request.url
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise ConfigError(f"init_method={request.init_method!r} has no absolute path. Expected file:///folder/name.")
    return Path(url.path)


def _request_for_port(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token[:8]}.far")


FILE = Method("file", "file:///PATH", _make)
