"""Time limits that separate an immediate reaction from a timeout, for tests on busy machines.

``allranks bench`` measures the latency on an idle machine.
"""

from __future__ import annotations

__all__ = ["COMMAND_S", "PROMPT_S"]

PROMPT_S = 8.0
"""Shorter than the timeouts of allranks: 15 s until a host is considered lost, 10 s of ``--grace``, group timeouts."""

COMMAND_S = 20.0
"""The same limit for a whole command, which uses a longer ``--grace``."""
