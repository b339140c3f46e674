"""``allranks submit``: writes the job file of a batch system or of Kubernetes, and submits it.

==============  ============================================================
``options``     the command line -> ``Job``
``submission``  the file -> the job's id, and the next commands
==============  ============================================================

The ``Submission`` of a scheduler (``allranks._cluster.schedulers``) creates the file of a ``Job``. Users can read,
change and keep the file. It runs ``allranks run``, which starts the ranks on all hosts of the allocation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from allranks._base.console import harmless, put
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import USAGE

__all__ = ["main"]

_PRIVATE = 0o600  # the file contains the secret of the job


def main(argv: Sequence[str]) -> int:
    """Write the job file to stdout or to a file; with ``--now``, submit it and print the job's id.

    Returns:
        The exit code: 2 if the arguments are wrong or the file cannot be submitted from this host. Otherwise the exit
            code of the system's command.
    """
    from allranks.tools.submit import options, submission

    try:
        wanted = options.parse(argv)
        text = wanted.submission.file(wanted.job)
        if wanted.file is not None:
            # Only the user may read a file that contains the job's secret.
            _write(wanted.file, text, _PRIVATE if wanted.job.secret else 0o666)
        if not wanted.now:
            if wanted.file is None:
                put(text)
            return 0
        return submission.submit_job(wanted.to, text, wanted.job, wanted.quiet)
    except ConfigError as error:
        print(harmless(f"allranks submit: error: {error}"), file=sys.stderr)
        return USAGE


def _write(file: str, text: str, mode: int) -> None:
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as out:
            if mode == _PRIVATE:
                os.fchmod(out.fileno(), mode)  # otherwise an existing file keeps its mode
            out.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {file!r}: {error.strerror}") from None
