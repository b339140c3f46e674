"""The workers and groups of one master: their devices, and their numbers in the outbox."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Sequence

from allranks._base.errors import UsageError
from allranks.remote.master.connections import SHUT_DOWN, Connections, InheritedCalls, LostWorkerCalls
from allranks.remote.torch_device.devices import end_device, index_is_free, make_device, places
from allranks.remote.torch_device.handle import DeviceTarget, Driver

__all__ = ["DeviceTable", "Link"]

_LAST_INDEX = 127  # torch stores a device's index in a signed byte
_LATEST = 4  # number of recent groups that are kept alive

Link = tuple[tuple[int, ...], int]
"""A native group of workers: its ranks, and its number."""


class DeviceTable:
    """The devices of one master.

    Attributes:
        connections: The connections with the workers.
        groups: All targets, of workers and of groups that are still in use, by their ranks.
        ended_links: Links that have ended, and that some of their workers must still leave.
    """

    def __init__(self, connections: Connections, master: Driver) -> None:
        self.connections = connections
        self.groups: weakref.WeakValueDictionary[tuple[int, ...], DeviceTarget] = weakref.WeakValueDictionary()
        self.ended_links: list[Link] = []
        self._master = master
        self._workers: dict[int, DeviceTarget] = {}  # strong references, unlike those to groups
        self._targets: dict[tuple[int, ...], int] = {}
        self._everyone: DeviceTarget | None = None
        # The name of a device does not keep its group alive, and a loop may create the same group again.
        self._latest: deque[DeviceTarget] = deque(maxlen=_LATEST)
        self._index = _LAST_INDEX + 1  # the index of the newest group
        self._gone: weakref.WeakSet[DeviceTarget] = weakref.WeakSet()  # targets that contain a lost worker

    def admit(self, rank: int) -> DeviceTarget:
        """Create the device of a new worker."""
        self._everyone = None
        # The new worker must not receive commands about the tensors of the worker that it replaces.
        self._targets = {ranks: target for ranks, target in self._targets.items() if rank not in ranks}
        made = self._workers[rank] = self._make((rank,), rank)
        return made

    def worker(self, rank: int) -> DeviceTarget:
        return self._workers[rank]

    def group(self, ranks: tuple[int, ...]) -> DeviceTarget:
        """Return the workers of these ranks as one target with its own device. A group that is still in use is reused.

        Raises:
            UsageError: Too many groups are in use.
        """
        if len(ranks) == 1:
            return self._workers[ranks[0]]
        found = self.groups.get(ranks)
        if found is None or isinstance(found.calls, LostWorkerCalls):
            found = self._make(ranks, self._spare_index())
        return found

    def keep(self, group: DeviceTarget) -> None:
        """Keep a returned group alive, together with the few before it."""
        if len(group.ranks) > 1:
            self._latest.append(group)

    def everyone(self) -> DeviceTarget:
        """Return all workers that are not lost, as one target."""
        ranks = tuple(self.connections.ranks)
        if self._everyone is None or self._everyone.ranks != ranks or isinstance(self._everyone.calls, LostWorkerCalls):
            indices = [self.connections.indices[each] for each in ranks]
            # This target is only passed to the outbox and has no device, so its index has no meaning.
            self._everyone = DeviceTarget(self._master, _LAST_INDEX, ranks, self.connections.outbox.target(indices))
        return self._everyone

    def all(self) -> list[DeviceTarget]:
        """Return the targets of this master that have a device."""
        return [each for each in places() if each.master is self._master]

    def target(self, ranks: Sequence[int]) -> int:
        """Return the outbox's number for some workers, in any order."""
        found = [each.target for each in self.groups.values() if set(each.ranks) == set(ranks)]
        return found[0] if found else self._target(tuple(ranks))

    def use_state(self, state: int) -> None:
        """Select the calls that were learned under this state of torch's flags."""
        for each in self.all():
            if not isinstance(each.calls, LostWorkerCalls):  # otherwise a lost worker would no longer raise
                each.calls = each.calls_by_flags.setdefault(state, {})

    def forget_calls(self) -> None:
        """Forget all calls. The workers' templates are no longer used."""
        for each in self.all():
            for calls in (each.calls, *each.calls_by_flags.values()):
                calls.clear()

    def mark_lost(self, rank: int, why: str) -> list[Link]:
        """End the groups of a lost worker. Return the links that it was in, which end, too."""
        ended: list[Link] = []
        for each in self.all():
            if rank in each.ranks:
                each.calls = LostWorkerCalls(why, rank, self.connections.loss_error)
                self._gone.add(each)
                # The worker's own device stays, so that its name leads to WorkerLost, not to an unknown device.
                if each.index != rank:
                    end_device(each.index)
            ended += [(ranks, each.links.pop(ranks)) for ranks in list(each.links) if rank in ranks]
        return ended

    def successor(self, old: DeviceTarget) -> DeviceTarget:
        """Return the target that replaces one with lost workers, with the same device if that is still free."""
        if not isinstance(old.calls, LostWorkerCalls):
            return old
        if len(old.ranks) == 1:
            return self._workers[old.ranks[0]]
        found = self.groups.get(old.ranks)
        if found is None or isinstance(found.calls, LostWorkerCalls):
            found = self._make(old.ranks, old.index if index_is_free(old.index) else self._spare_index())
        return found

    def restore_groups(self) -> None:
        """Restore groups whose lost workers have all been replaced. Their tensors stay lost."""
        for old in list(self._gone):
            if not any(rank in self.connections.lost for rank in old.ranks):
                old.successor = self.successor(old)
                self._gone.discard(old)

    def close(self) -> None:
        """End all devices."""
        self._latest.clear()
        for each in self.all():
            each.calls = LostWorkerCalls(SHUT_DOWN, 0)
            end_device(each.index)

    def abandon(self) -> None:
        """Refuse all calls. Used in a forked child, because the workers belong to the parent."""
        for each in self.all():
            each.calls = InheritedCalls()

    def _make(self, ranks: tuple[int, ...], index: int) -> DeviceTarget:
        self.connections.refuse_recording("the step creates a group")
        made = DeviceTarget(self._master, index, ranks, self._target(ranks))
        make_device(made)
        self.groups[ranks] = made
        # The finalizer may run in any thread. It only stores the links, and the thread that issues commands leaves
        # them.
        weakref.finalize(made, _end, made.links, self.ended_links).atexit = False
        return made

    def _target(self, ranks: tuple[int, ...]) -> int:
        if ranks not in self._targets:
            indices = [self.connections.indices[each] for each in ranks]
            self._targets[ranks] = self.connections.outbox.target(indices)
        return self._targets[ranks]

    def _spare_index(self) -> int:
        """Return an index for a group: the one that has been free for longest. Programs may still name the others."""
        indices = range(_LAST_INDEX, max(self.connections.by_rank), -1)
        free = list(filter(index_is_free, indices))
        if not free:
            self._latest.clear()
            gc.collect()  # frees handles that only a reference cycle keeps alive
            free = list(filter(index_is_free, indices))
        if not free:
            raise UsageError(
                f"group: {len(indices)} groups are in use, and torch supports no more devices.\n"
                "  Delete all references to a group, and to the tensors on it."
            )
        self._index = next((each for each in free if each < self._index), free[0])
        return self._index


def _end(links: dict[tuple[int, ...], int], ended: list[Link]) -> None:
    """Store the links of a target that is no longer used, so that the workers leave them."""
    ended += links.items()
