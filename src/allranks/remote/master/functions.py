"""Any Python function on a worker: data loading, logging, models of other libraries.

A function and its arguments are pickled. All other messages of this mode contain data only. Tensors on the worker are
passed without a copy, and the tensors that the function returns stay there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils._pytree import tree_map

from allranks._base import pickling
from allranks._base.errors import UsageError, WorkerLost
from allranks._base.threads import Daemon
from allranks.remote.master.groups import Group
from allranks.remote.protocol import wire
from allranks.remote.protocol.faults import Given, given
from allranks.remote.protocol.signature import signature
from allranks.remote.protocol.wire import Command
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.handle import DeviceTarget, Driver, Handle, make

__all__ = ["Future", "FutureWaiter", "RemoteFunction"]

_NAME = "remote function"


class Future(concurrent.futures.Future[Any]):
    """The future result of a function on a worker.

    It is a ``concurrent.futures.Future``: `concurrent.futures.wait`, ``as_completed`` and ``asyncio.wrap_future``
    accept it, and a coroutine can await it. A queued call cannot be cancelled: ``cancel()`` returns False.
    """

    def __init__(self, place: DeviceTarget, call: int, given: Sequence[Handle], held: Sequence[Handle]) -> None:
        super().__init__()
        self._place = place
        self._call = call
        numbered = [*enumerate(given), *((-1 - number, each) for number, each in enumerate(held))]
        self._leaves = {number: each for number, each in numbered if _is_leaf(each)}
        self._number = 0
        self._answer: Any = None
        self._error: BaseException | None = None
        self._answered = self._is_built = False
        self._request_lock = threading.Lock()  # held by the thread that waits for the answer
        self._watched = False
        self._waiters = _Waiters(self)

    def __repr__(self) -> str:
        return f"Future(on {self._place}, {'done' if super().done() else 'queued'})"

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the function's result. Its tensors are handles on the worker.

        Gradients that the function has computed are added to those of the tensors that were passed to it.

        Args:
            timeout: Time limit in seconds. None: that of `init_master_worker`.

        Raises:
            RemoteError: The function raised, or a tensor passed to it is the result of a failed operation.
            WorkerLost: The worker is lost.
            TimeoutError: The time limit has passed. The caller may wait again.
        """
        self._place.master.connections.refuse_recording("the step waits for the result of a remote function")
        self._wait_for_answer(timeout)
        with self._request_lock:
            # Under the lock, because two threads that request the result must not add the gradients twice.
            if not self._is_built and self._error is None:
                self._build_result()
        # The watcher's thread does not replace lost workers, so this thread does.
        if isinstance(self._error, WorkerLost) and self._watched:
            raise self._place.master.connections.loss_error(self._error.rank, str(self._error))
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `result` would raise, or None."""
        self._wait_for_answer(timeout)
        try:
            self.result()
        except Exception as error:  # noqa: BLE001 - the caller requests the exception
            return error
        return None

    def done(self) -> bool:
        """Return whether the function has returned or raised. Does not wait."""
        if not super().done() and not self._watched:
            # A watched future is completed by the watcher's thread, and needs no request here.
            with contextlib.suppress(TimeoutError):
                self._wait_for_answer(0.0)
        return super().done()

    def running(self) -> bool:
        """Return whether it is not done. A queued call always counts as running."""
        return not self.done()

    def cancel(self) -> bool:
        """Return False: a queued call cannot be cancelled."""
        return False

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call a function with the future when it is done, in another thread, or immediately if it is already done."""
        super().add_done_callback(fn)
        self._watch()

    def _watch(self) -> None:
        """Make a thread wait for the answer."""
        if not self._watched and not super().done():
            self._watched = True
            self._place.master.watch(self)

    def _wait_for_answer(self, timeout: float | None) -> None:
        """Wait for the answer.

        Raises:
            TimeoutError: It does not arrive in time.
        """
        if self._answered:
            return
        connections = self._place.master.connections
        began, patience = time.monotonic(), connections.timeout_s if timeout is None else timeout
        if not self._request_lock.acquire(timeout=patience):
            raise connections.unanswered(self._place.ranks[0], patience, _NAME)
        try:
            # Another thread has received the answer while this one waited for the lock.
            if self._answered:
                return
            self._request_answer(max(0.0, patience - (time.monotonic() - began)))
        except TimeoutError:
            raise connections.unanswered(self._place.ranks[0], patience, _NAME) from None
        finally:
            self._request_lock.release()
        # After the lock is released, because this runs callbacks, which request the result.
        if self._error is None:
            self.set_result(None)  # `result` computes the value from the answer
        else:
            self.set_exception(self._error)

    def _request_answer(self, timeout: float) -> None:
        place, connections = self._place, self._place.master.connections
        try:
            connections.check(place)
            # After a timeout the request is still queued, so a retry only waits for its answer.
            if not self._number:
                self._number = connections.next_number()
                connections.put(place, Command("result", self._number, {"call": self._call}))
            self._answer = connections.wait(self._number, place.ranks[0], _NAME, timeout_s=timeout)
        except TimeoutError:  # not stored in `_error`, because the caller may wait again
            raise
        except Exception as error:  # noqa: BLE001 - `result` raises it, also on later calls
            self._error = error
        self._answered = True

    def _build_result(self) -> None:
        """Build the result from the answer. This runs in the thread that requests it, because it adds gradients."""
        place, connections = self._place, self._place.master.connections
        metas, pickled, leaves = self._answer
        self._is_built, self._answer = True, None
        try:
            connections.check(place)
            sigs = [signature(wire.dtype_of(dtype), shape, strides, bits) for dtype, shape, strides, _, bits in metas]
            refs = connections.outbox.reserve(place.target, len(sigs))
            connections.command(place, "keep", of=self._number, ids=[each.id for each in refs])
            tensors = [make(place, sig, ref, meta[3]) for sig, ref, meta in zip(sigs, refs, metas, strict=True)]
            self._add_gradients(dict(zip(leaves, tensors[len(tensors) - len(leaves) :], strict=True)))
            result = cloudpickle.loads(pickled)
            self._result = tree_map(lambda each: tensors[each.number] if isinstance(each, Given) else each, result)
        except Exception as error:  # noqa: BLE001 - `result` raises it, also on later calls
            self._error = error

    def _add_gradients(self, found: dict[int, torch.Tensor]) -> None:
        with torch.no_grad():
            for number, gradient in found.items():
                leaf: Any = self._leaves[number]
                if leaf._place.target != self._place.target:
                    raise UsageError(
                        f"remote: the function computed a gradient on {self._place} of a tensor on {leaf._place}.\n"
                        "  Return the gradient, and pass x.detach() to the function."
                    )
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._leaves.clear()

    def __del__(self) -> None:
        connections = self._place.master.connections
        if connections.closed:
            return
        # The worker keeps the outcome of a call until it is requested or dropped.
        if not self._number:
            connections.command(self._place, "drop", call=self._call)
        elif not self._is_built and self._error is None:
            connections.command(self._place, "keep", of=self._number, ids=None)


class _Waiters(list[Any]):
    """The waiters that ``concurrent.futures`` adds to a future. A new waiter makes a thread wait for the answer."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = weakref.ref(future)

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        if (future := self._future()) is not None:
            future._watch()


class FutureWaiter:
    """Waits for the answers of futures that have callbacks. One thread for each worker waits for them in order."""

    def __init__(self) -> None:
        self._queues: dict[int, queue.SimpleQueue[Future]] = {}
        self._lock = threading.Lock()

    def watch(self, future: Future) -> None:
        """Wait for the answer of one more future."""
        rank = future._place.ranks[0]
        with self._lock:  # else two threads could start a second thread for one worker
            if rank not in self._queues:
                self._queues[rank] = queue.SimpleQueue()
                Daemon(target=self._wait_for_answers, args=(self._queues[rank],)).start()
            self._queues[rank].put(future)

    def _wait_for_answers(self, futures: queue.SimpleQueue[Future]) -> None:
        while True:
            future = futures.get()
            while not future._answered:
                connections = future._place.master.connections
                # The time limit is meant for callers. This thread waits until the worker answers or is lost.
                with contextlib.suppress(TimeoutError), connections.without_recovery():
                    future._wait_for_answer(None)
            del future  # otherwise this variable keeps the tensors of the last future alive


class _FunctionPickler(pickling.Pickler):
    """Pickles references to tensors on workers, including those inside objects, such as a module's parameters."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Handle] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Handle):
            return super().reducer_override(obj)
        self.tensors.append(obj)
        return given, (len(self.tensors) - 1, isinstance(obj, torch.nn.Parameter), _is_leaf(obj))


def _is_leaf(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf)


def _pickle(value: Any) -> tuple[bytes, list[Handle]]:
    file = io.BytesIO()
    pickler = _FunctionPickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


class RemoteFunction:
    """A function that runs on workers: ``mw.remote(fn)(args)`` queues a call and returns a `Future`.

    It runs on the worker or group that `on` names. If `on` is None, it runs on the worker of the first tensor among its
    arguments, or else on the current worker. On a group it runs on each worker, and the results are a list.
    """

    def __init__(self, master: Driver, function: Callable[..., Any], on: Any) -> None:
        if not callable(function):
            raise UsageError(f"remote: expected a function, not {type(function).__name__}")
        self._master = master
        self._pickled, self._held = _pickle(function)  # and the tensors on workers that the function holds
        self._on = on
        self._number = master.connections.next_number()
        self._known: dict[int, DeviceTarget] = {}
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pickled, tensors = _pickle((args, kwargs))
        place = self._choose_target([*tensors, *self._held])
        for what, those in (("an argument", tensors), ("a tensor that it holds", self._held)):
            for each in those:
                if not set(place.ranks) <= set(each._place.ranks):
                    raise RuntimeError(
                        f"remote: {self.__name__} runs on {place}, but {what} is on {each._place}.\n"
                        f"  Send it first, with .to('{place.device}')."
                    )
        self._master.connections.refuse_recording("the step runs a function on a worker")
        futures = [self._start(self._master.devices.worker(rank), tensors, pickled) for rank in place.ranks]
        return futures[0] if len(futures) == 1 else Futures(futures)

    def __del__(self) -> None:
        for place in getattr(self, "_known", {}).values():  # `__init__` may have raised
            if not self._master.connections.closed:
                self._master.connections.command(place, "forget", function=self._number)

    def _choose_target(self, tensors: list[Handle]) -> DeviceTarget:
        if self._on is not None:
            return _place_on(self._on)
        return tensors[0]._place if tensors else place_of(None)

    def _start(self, place: DeviceTarget, tensors: list[Handle], pickled: bytes) -> Future:
        connections = self._master.connections
        connections.check(place)
        if place.target not in self._known:
            connections.outbox.put(
                place.target,
                wire.pack(
                    Command("function", 0, {"name": self._number, "tensors": [each._ref.id for each in self._held]})
                ),
                self._pickled,
            )
            # A replaced worker has another target number, so it receives the function again.
            self._known[place.target] = place
        call = connections.next_number()
        arguments = {
            "call": call,
            "function": self._number,
            "tensors": [each._ref.id for each in tensors],
            "line": here(1),
            # A program that replaces these streams here, such as a notebook, must receive the function's output.
            "prints_there": sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__,
        }
        connections.outbox.put(place.target, wire.pack(Command("start", 0, arguments)), pickled)
        return Future(place, call, tensors, self._held)


def _place_on(on: Any) -> DeviceTarget:
    """Return the workers that a device, a rank or a group names."""
    if isinstance(on, Group):
        return on._place
    return place_of(torch.device("worker", on) if isinstance(on, int) else torch.device(on))


class Futures(list[Future]):
    """The futures of a group's workers."""

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return asyncio.gather(*map(asyncio.wrap_future, self)).__await__()

    def done(self) -> bool:
        """Return whether all are done."""
        return all(each.done() for each in self)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all, and return their results in the order of the ranks."""
        until = None if timeout is None else time.monotonic() + timeout
        return [each.result(None if until is None else max(0.0, until - time.monotonic())) for each in self]
