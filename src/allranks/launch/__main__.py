"""``python -m allranks.launch`` is ``allranks launch``, as ``python -m torch.distributed.launch`` is torch's."""

from __future__ import annotations

import sys

from allranks._base.console import run_process
from allranks.launch.torchrun import launch as main

__all__ = ["main"]

if __name__ == "__main__":
    run_process("allranks launch", lambda: main(sys.argv[1:]))
