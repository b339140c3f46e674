"""Time limits that separate an immediate reaction from a timeout, for tests on busy machines.

``allranks bench`` measures the latency on an idle machine.
"""

from __future__ import annotations

__all__ = ["COMMAND_S", "PROMPT_S"]

PROMPT_S = 5.0
"""Less than is waited for otherwise: 15 s until a host is taken for lost, 10 s of ``--grace``, and groups' timeouts."""

COMMAND_S = 20.0
"""The same of a whole command, whose ``--grace`` is longer."""
