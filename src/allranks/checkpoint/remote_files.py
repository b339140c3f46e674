"""Transfer of file contents from ranks whose host has the file to ranks whose host lacks it.

A rank learns what it needs only while it fills its state, so the ranks proceed in rounds. In each round, every rank
reports its next request, or that it needs nothing more. The ranks that have the requested bytes send them, at most
64 MiB to each rank. A rank takes part in a round when it needs something or has filled its state. The last round is the
one without requests. The failure of a rank is reported in the next round, and ends the load on all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from allranks._base.errors import CheckpointError, UsageError
from allranks._call.bytes import view_of
from allranks.checkpoint import parts
from allranks.checkpoint.participants import Participants, error_text, remote_load_error, this_process
from allranks.checkpoint.selection import SelectedCheckpoint

__all__ = ["RemoteFile", "TransferRounds"]

_MAX_RANGE_BYTES = 64 << 20  # maximum bytes that a rank receives in a round
_MIN_RANGE_BYTES = 4 << 20  # minimum bytes: neighboring small tensors arrive in one round
_CACHE_BYTES = 128 << 20  # bytes of received data that a rank keeps


class _RangeRequest(NamedTuple):
    """Request of a rank: a range of bytes of a file."""

    file: int
    begin: int
    end: int


class _RoundMessage(NamedTuple):
    """Message of a rank in a round.

    Attributes:
        request: The next request. None: the rank needs nothing more.
        trouble: Why the rank cannot continue; "" if it can.
        is_usage: The failure is a UsageError.
        process: Host and pid.
    """

    request: _RangeRequest | None
    trouble: str
    is_usage: bool
    process: tuple[str, int]


class TransferRounds:
    """Load of a checkpoint if some ranks do not see all files. All ranks create one, and end it with ``finish``."""

    def __init__(self, selected: SelectedCheckpoint, participants: Participants) -> None:
        self._selected, self._participants = selected, participants
        self._is_over = False
        self._trouble = ""  # why this rank could not read a file for another rank
        self._open = contextlib.ExitStack()
        self._files: dict[int, parts.LocalFile] = {}
        self._windows: OrderedDict[int, tuple[int, Tensor]] = OrderedDict()

    def file(self, number: int) -> RemoteFile:
        """Return a file that this rank does not see."""
        return RemoteFile(self, number, self._selected.manifest.files[number].nbytes, self._windows)

    def fetch(self, file: int, begin: int, end: int) -> Tensor:
        """Return bytes of a file that this rank does not see.

        Raises:
            CheckpointError: A rank cannot continue. UsageError if that rank has raised one.
        """
        # The sender may fail to read the file. It reports the failure in the next round, which raises.
        received = None
        while received is None:
            _, received = self._round(_RangeRequest(file, begin, end))
        return received

    def finish(self, error: Exception | None = None) -> None:
        """Send what other ranks request, until no rank requests anything.

        Args:
            error: Why the load of this rank has failed. It is sent to the other ranks, and not raised here.

        Raises:
            CheckpointError: Another rank cannot continue. UsageError if that rank has raised one.
        """
        with self._open:
            while not self._is_over:
                try:
                    self._is_over, _ = self._round(None, error)
                # This rank's own error is raised by the caller, and is the cause of this one.
                except (CheckpointError, UsageError):
                    if error is None:
                        raise

    def _round(self, request: _RangeRequest | None, error: Exception | None = None) -> tuple[bool, Tensor | None]:
        """Run one round. Return whether it was the last, and the received bytes.

        The bytes are None if this rank has requested nothing, or if the sender could not read them.
        """
        participants = self._participants
        trouble = self._trouble or ("" if error is None else error_text(error))
        is_usage = isinstance(error, UsageError) and not self._trouble
        messages: list[_RoundMessage] = participants.exchange(
            _RoundMessage(request, trouble, is_usage, this_process()), _RoundMessage
        )
        for rank, message in enumerate(messages):
            if message.trouble:
                # The other ranks raise as well, so no further round follows.
                self._is_over = True
                raise remote_load_error(rank, message.process, message.trouble, message.is_usage)
        received, wait = None, None
        if request is not None:
            received = torch.empty(
                request.end - request.begin + 1, dtype=torch.uint8, device="cpu"
            )  # the last byte is 1 if the sender could read the file
            wait = participants.receive(received, self._sender(participants.rank, request))
        # Each rank has started its receive before it sends, so blocking sends cannot deadlock.
        for rank, message in enumerate(messages):
            if message.request is not None and self._sender(rank, message.request) == participants.rank:
                participants.send(self._read(message.request), rank)
        if received is None or wait is None:
            return all(message.request is None for message in messages), None
        wait()
        return False, received[:-1] if received[-1] else None

    def _sender(self, rank: int, request: _RangeRequest) -> int:
        """Return the rank that sends a file to `rank`, one of the ranks that see the file."""
        holders = self._selected.holders[self._selected.manifest.files[request.file].share]
        # Spread the requesting ranks over the holders. All ranks compute the same sender.
        return holders[rank % len(holders)]

    def _read(self, request: _RangeRequest) -> Tensor:
        data = torch.empty(request.end - request.begin + 1, dtype=torch.uint8, device="cpu")
        data[-1] = 1
        file = self._selected.manifest.files[request.file]
        try:
            if request.file not in self._files:
                folder = self._selected.local_folders[file.share]
                # Kept open until the load ends: several ranks request several ranges of a file.
                self._files[request.file] = self._open.enter_context(parts.open_part(folder, file))
            _fill(self._files[request.file], request.begin, view_of(data, writable=True)[:-1], file.name)
        except (OSError, CheckpointError) as error:
            self._trouble = f"{file.name} cannot be read: {error_text(error)}"
            # The receive is already posted, so a failed sender must still send the announced number of bytes.
            data[-1] = 0
        return data


def _fill(file: parts.LocalFile, begin: int, view: memoryview, name: str) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(file.fd, [view[done:]], begin + done)
        if not got:
            raise CheckpointError(f"{name} ends at byte {begin + done}")
        done += got


class RemoteFile:
    """A file that this rank does not see: a ``parts.Source``."""

    def __init__(
        self, rounds: TransferRounds, number: int, nbytes: int, windows: OrderedDict[int, tuple[int, Tensor]]
    ) -> None:
        self._rounds, self._number, self._nbytes = rounds, number, nbytes
        self._windows = windows  # received ranges of all files

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """See ``parts.Source``."""
        end = where + len(view)
        begin, window = self._windows.get(self._number, (0, None))
        if window is None or not begin <= where <= end <= begin + window.nbytes:
            self._windows.pop(self._number, None)
            if ahead - where < _MIN_RANGE_BYTES:  # a small range: include its neighborhood
                begin = where // _MIN_RANGE_BYTES * _MIN_RANGE_BYTES
                last = max(end, begin + _MIN_RANGE_BYTES)
            else:
                begin, last = where, max(end, min(where + _MAX_RANGE_BYTES, ahead))
            window = self._rounds.fetch(self._number, begin, min(last, self._nbytes))
            self._windows[self._number] = begin, window
            while len(self._windows) > 1 and sum(cached.nbytes for _, cached in self._windows.values()) > _CACHE_BYTES:
                self._windows.popitem(last=False)
        view[:] = view_of(window)[where - begin : end - begin]
        return xxhash.xxh3_64_intdigest(view)
