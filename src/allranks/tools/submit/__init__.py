"""``allranks submit``: writes the file that a batch system or Kubernetes starts a job from, and hands it in.

===========  ============================================================
``options``  the command line -> ``Job``
``hand_in``  the file -> the job's id, and what to type next
===========  ============================================================

The ``Submission`` of a scheduler (``allranks._cluster.schedulers``) makes the file of a ``Job``. It is one that its
user can read, change and keep. In it stands ``allranks run``, which starts the ranks on all hosts of the allocation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from allranks._base.console import harmless, put
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import USAGE

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """The command: the file to stdout, or where it is wanted; with ``--now`` the job's id instead.

    Returns:
        The exit code: 2 where the arguments are wrong or the file cannot be handed in from here, else that of the
        system's own command.
    """
    from allranks.tools.submit import hand_in, options

    try:
        wanted = options.parse(argv)
        text = wanted.submission.file(wanted.job)
        if wanted.file is not None:
            _write(wanted.file, text, 0o600 if wanted.job.secret else 0o666)
        if not wanted.now:
            if wanted.file is None:
                put(text)
            return 0
        return hand_in.hand_in(wanted.to, text, wanted.job, wanted.quiet)
    except ConfigError as error:
        print(harmless(f"allranks submit: error: {error}"), file=sys.stderr)
        return USAGE


def _write(file: str, text: str, mode: int) -> None:
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {file!r}: {error.strerror}") from None
