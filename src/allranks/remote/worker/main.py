"""``python -m allranks.remote.serve``: a worker that does not run a user program."""

from __future__ import annotations

import signal

from allranks.remote.bootstrap.worker_context import serve_here

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master; a worker terminates with it
    serve_here()
