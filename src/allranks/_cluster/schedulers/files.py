"""Files in which a scheduler lists the hosts of an allocation."""

from __future__ import annotations

from allranks._base.errors import ConfigError
from allranks._base.files import read_text
from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots, count_lines

__all__ = ["counted_lines", "text_of"]


def counted_lines(context: LaunchContext) -> tuple[Slots, ...]:
    """Return the hosts in a file that has one line per process.

    Raises:
        ConfigError: The file cannot be read, or is invalid.
    """
    return count_lines(*text_of(context))


def text_of(context: LaunchContext) -> tuple[str, str]:
    """Return the content of the host file, and its path.

    Raises:
        ConfigError: The file cannot be read.
    """
    _, _, path = context.hostfile.partition("=")
    try:
        return read_text(path), path
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not text" if isinstance(error, ValueError) else str(error.strerror or error).lower()
        raise ConfigError(
            f"{context.hostfile}: the list of this job's hosts cannot be read: {why}.\n"
            "  Make the file readable on this host."
        ) from None
