"""What is at once, and what is a wait for a timeout: tests run beside others, on machines that do other things, too.

How long it takes on a quiet machine is what ``allranks bench`` measures.
"""

from __future__ import annotations

__all__ = ["PROMPT_S"]

PROMPT_S = 10.0  # less than any timeout that what is tested would otherwise run into
