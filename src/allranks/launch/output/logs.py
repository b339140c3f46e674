"""Output of ranks in files: ``rankN.log`` with complete lines of both streams, and torchrun's files with the bytes.

The layout of torchrun, which its users' tools read (torch/distributed/elastic/multiprocessing/api.py,
DefaultLogsSpecs): ``DIR/<run id>_<random>/attempt_<number>/<local rank>/{stdout,stderr}.log``; one run folder for each
host.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from allranks._base.errors import ConfigError
from allranks.launch.spec.options import Display

__all__ = ["Logs"]


@dataclass
class _LogFile:
    option: str
    file: FileIO
    waiting: bytearray = field(default_factory=bytearray)


class Logs:
    """The log files of a job.

    Args:
        display: the requested files.
        places: rank -> (host, local rank).
        run_id: the job's name.
        attempt: number of restarts of the job so far.

    Attributes:
        folder: the folder of ``--logs``; None if there is none.
        temporary: temporary folder for the files of torchrun, which is kept; None if there is none.

    Raises:
        ConfigError: a file cannot be created.
    """

    def __init__(self, display: Display, places: Mapping[int, tuple[str, int]], run_id: str, attempt: int) -> None:
        self._lines: dict[int, _LogFile] = {}
        self._bytes: dict[tuple[int, int], _LogFile] = {}
        self.temporary: Path | None = None
        self.folder = display.logs
        if (folder := display.logs) is not None:
            with _refusing("--logs", folder):
                folder.mkdir(parents=True, exist_ok=True)
                how = "ab" if attempt else "wb"
                self._lines = {rank: _open("--logs", folder / f"rank{rank}.log", how) for rank in places}
        if display.log_dir is None and not (display.tee or display.redirects):
            return
        with _refusing("--log-dir", display.log_dir or Path(tempfile.gettempdir())):
            if (base := display.log_dir) is None:
                base = self.temporary = _temporary_folder(run_id)
            base.mkdir(parents=True, exist_ok=True)
            for rank, (host, local_rank) in places.items():
                own = _run_folder(base, run_id, host) / f"attempt_{attempt}" / str(local_rank)
                own.mkdir(parents=True)
                for stream, name in ((1, "stdout.log"), (2, "stderr.log")):
                    if display.tee.has(local_rank, stream) or display.redirects.has(local_rank, stream):
                        self._bytes[rank, stream] = _open("--log-dir", own / name)

    def has_lines(self, rank: int) -> bool:
        """Return True if ``put_lines`` has a file for this rank."""
        return rank in self._lines

    def has_bytes(self, rank: int, stream: int) -> bool:
        """Return True if ``put_bytes`` has a file for this stream."""
        return (rank, stream) in self._bytes

    def put_lines(self, rank: int, lines: bytes) -> None:
        """Queue complete lines for a rank's file."""
        if rank in self._lines:
            self._lines[rank].waiting += lines

    def put_bytes(self, rank: int, stream: int, data: bytes) -> None:
        """Queue output of a rank for the stream's file."""
        if (rank, stream) in self._bytes:
            self._bytes[rank, stream].waiting += data

    def flush(self) -> list[tuple[str, OSError]]:
        """Write all queued data.

        Returns:
            The options whose files are no longer writable, with the errors; each is returned once.
        """
        lost: dict[str, OSError] = {}
        for log in (*self._lines.values(), *self._bytes.values()):
            try:
                while log.waiting and log.option not in lost:
                    del log.waiting[: log.file.write(log.waiting)]
            except OSError as error:
                lost[log.option] = error
        for option in lost:
            self._drop(option)
        return list(lost.items())

    def close(self) -> None:
        """Close all files."""
        for option in ("--logs", "--log-dir"):
            self._drop(option)

    def _drop(self, option: str) -> None:
        files: dict[int, _LogFile] | dict[tuple[int, int], _LogFile] = (
            self._lines if option == "--logs" else self._bytes
        )
        for log in files.values():
            # On network file systems close repeats the error of a write (close(2)), which was reported already.
            with contextlib.suppress(OSError):
                log.file.close()
        files.clear()


def _open(option: str, path: Path, how: str = "wb") -> _LogFile:
    return _LogFile(option, FileIO(path, how))


@functools.cache  # one folder for all attempts of a run
def _temporary_folder(run_id: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="allranks_"))


@functools.cache
def _run_folder(base: Path, run_id: str, host: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=base))


@contextlib.contextmanager
def _refusing(option: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = str(error.filename or folder)
        raise ConfigError(f"cannot write to {where!r} for {option} {folder}: {error.strerror}") from None
