"""What is at once, and what is a wait for a timeout: tests run beside others, on machines that do other things, too.

How long it takes on a quiet machine is what ``allranks bench`` measures.
"""

from __future__ import annotations

__all__ = ["COMMAND_S", "PROMPT_S"]

PROMPT_S = 5.0
"""Less than is waited for otherwise: 15 s until a host is taken for lost, 10 s of ``--grace``, and groups' timeouts."""

COMMAND_S = 20.0
"""The same of a whole command, whose ``--grace`` is longer."""
