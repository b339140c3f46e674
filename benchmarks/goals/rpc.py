"""torch's RPC, for comparison with master-worker mode: ``rpc.remote`` for each operation, ``to_here`` for a value.

It runs in two separate processes, which contain no code of allranks, on TensorPipe with its default settings: on one
host through shared memory. The driver, ``python benchmarks/goals/rpc.py FILE``, reads one command from each line of
its standard input and answers with a line of JSON. The driver and its worker exit when the input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

__all__ = ["RpcPeer"]

_WORKER = "worker"
_START_S = 60


class RpcPeer:
    """The client of the driver process.

    Attributes:
        missing: Why torch's RPC is not available; "" if it is available.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="allranks-bench-")
        self._driver = subprocess.Popen(
            [sys.executable, __file__, f"{self._folder.name}/store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.missing: str = self._hear()
        except RuntimeError:
            self.close()
            raise

    def chain(self, calls: int) -> tuple[float, float]:
        """Return the seconds until ``calls`` additions are queued, and until they are done.

        Each addition uses the previous result.
        """
        queued, done = self._ask("chain", calls)
        return queued, done

    def fetch(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls of ``to_here`` of a tensor with one element."""
        found: list[float] = self._ask("fetch", calls)
        return found

    def close(self) -> None:
        """Terminate both processes."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.close()
        self._driver.wait()
        self._driver.stdout.close()
        self._folder.cleanup()

    def _ask(self, command: str, calls: int) -> Any:
        assert self._driver.stdin is not None
        print(command, calls, file=self._driver.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the processes of torch's RPC exited with code {self._driver.wait()}; see the output above"
            )
        return json.loads(line)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _rpc() -> Any:
    from torch.distributed import rpc  # typed incompletely, so it is used as Any

    return rpc


def _join(name: str, rank: int, store: str) -> None:
    rpc = _rpc()
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch warns about its own class
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=_START_S)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _add(left: Any, right: Any) -> torch.Tensor:
    made: torch.Tensor = left.to_here() + right.to_here()  # both values are local
    return made


def _fill(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value)


def _drive(store: str) -> None:
    rpc = _rpc()
    if not rpc.is_available():
        _say("this torch is built without RPC")
        return
    torch.set_num_threads(1)
    # The worker's input is closed when this process terminates, for any reason.
    worker = subprocess.Popen([sys.executable, __file__, store, _WORKER], stdin=subprocess.PIPE, text=True)
    try:
        _join("master", 0, store)
        _say("")
        _obey(rpc.remote)
        print("end", file=worker.stdin, flush=True)
        rpc.shutdown()
    finally:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def _obey(remote: Any) -> None:
    zero, one, number = (remote(_WORKER, _fill, args=args) for args in ((0.0, 16), (1.0, 16), (1.0, 1)))
    for line in sys.stdin:
        command, calls = line.split()
        if command == "chain":
            last = zero
            began = time.perf_counter()
            for _ in range(int(calls)):
                last = remote(_WORKER, _add, args=(last, one))
            queued = time.perf_counter() - began
            assert last.to_here().tolist() == [float(calls)] * 16
            _say((queued, time.perf_counter() - began))
        else:
            number.to_here()
            times = []
            for _ in range(int(calls)):
                began = time.perf_counter()
                number.to_here()
                times.append(time.perf_counter() - began)
            _say(times)


def _serve(store: str) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _join(_WORKER, 1, store)
    if sys.stdin.readline():
        rpc.shutdown()
    else:
        os._exit(1)  # the driver has terminated, and shutdown() would wait for it


if __name__ == "__main__":
    given, *worker_name = sys.argv[1:]
    (_serve if worker_name else _drive)(given)
