"""The interface for packages that provide a scheduler, and helpers to implement it.

The package has an entry point in the group ``allranks.schedulers``. Its name is the name of the scheduler, and its
object is a ``Scheduler``. ``ALLRANKS_ENV``, ``allranks run --env`` and ``allranks submit --to`` then accept that name.
docs/extending.md has a worked example. Importing this module does not import torch.
"""

from __future__ import annotations

from allranks._base.errors import ConfigError
from allranks._cluster.context import Clue, LaunchContext
from allranks._cluster.hostlist import Slots, expand_hosts, parse_hosts
from allranks._cluster.reading import Reader, TaskVariables, allocation_of
from allranks._cluster.schedulers.files import counted_lines
from allranks._cluster.schedulers.interface import INTERFACE, Job, RemoteCommand, Scheduler, Submission
from allranks._cluster.schedulers.script import job_script

__all__ = [
    "INTERFACE",
    "Clue",
    "ConfigError",
    "Job",
    "LaunchContext",
    "Reader",
    "RemoteCommand",
    "Scheduler",
    "Slots",
    "Submission",
    "TaskVariables",
    "allocation_of",
    "counted_lines",
    "expand_hosts",
    "job_script",
    "parse_hosts",
]
