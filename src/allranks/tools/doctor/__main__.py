"""``python -m allranks.tools.doctor``: the program that ``allranks doctor -n N`` runs on each rank."""

from __future__ import annotations

import sys

from allranks._base.console import run_command
from allranks.tools.doctor import main

if __name__ == "__main__":
    sys.exit(run_command("allranks doctor", lambda: main(sys.argv[1:])))
