"""``python -m allranks.launch`` is ``allranks run``, as ``python -m torch.distributed.launch`` is torchrun."""

from __future__ import annotations

import sys

from allranks.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
