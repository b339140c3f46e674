"""The file in which the caller of torchrun expects the reason of a failure: TORCHELASTIC_ERROR_FILE.

torchrun copies into it the error of a rank whose main function is decorated by ``record``. allranks's ranks report all
their failures, so the launcher writes the file for each failed job.

Source: torch.distributed.elastic.multiprocessing.errors for the name and the contents.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from allranks.launch.policy.root_cause import Failure
from allranks.launch.reporter import Reporter

__all__ = ["write_error_file"]


def write_error_file(cause: Failure | None, environ: Mapping[str, str], reporter: Reporter) -> None:
    """Write the file if it is requested and a rank failed.

    Args:
        cause: the failure that caused the others; None if there is none.
        environ: the launcher's environment.
        reporter: reports why the file cannot be written.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or cause is None:
        return
    report = cause.report
    more = {"py_callstack": report.text if report is not None else "", "timestamp": str(int(time.time()))}
    title = report.title if report is not None and report.title else str(cause)
    error = {"message": {"message": title, "extraInfo": more, "errorCode": cause.exit_code}}
    try:
        Path(path).write_text(json.dumps(error))
    except OSError as trouble:
        reporter.report(f"cannot write TORCHELASTIC_ERROR_FILE={path}: {trouble.strerror}")
