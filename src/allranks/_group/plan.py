"""Plans: calls of a group that are prepared once and executed many times, like MPI's persistent collectives.

The Python cost of a call is the check of its arguments. A plan has checked them already. If its engine can prepare the
call (``Engine.prepare``), the core keeps everything that the call needs. Otherwise, a plan makes the ordinary call.

A plan stays valid for the life of its group. The group notifies its plans when its engine is replaced or closed. The
plans then prepare the call again when they are next called, or raise the error of an ordinary call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks._base.verbs import names
from allranks._core import Planned

if TYPE_CHECKING:
    from allranks._call.work import Work
    from allranks._group.communicator import Communicator

__all__ = ["VERBS", "Plan"]

VERBS = (*names(planned=True), "all_to_all_single")
"""The verbs that can be planned."""


class Plan(Planned):
    """A call that ``ProcessGroup.plan`` has prepared. ``plan()`` executes it on the tensors of the plan.

    ``plan(async_op=True)`` returns immediately, with a Work. For the other ranks, the call is identical to that of the
    group's method with the plan's arguments. It raises the same errors.

    Attributes:
        group: The group of the call.
        verb: The name of the call.
    """

    __slots__ = ("__weakref__", "_call", "_given", "group", "verb")

    def __init__(self, group: Communicator, verb: str, *args: Any, **named: Any) -> None:
        super().__init__()
        if verb not in VERBS:
            raise UsageError(f"plan: {verb!r} cannot be planned. Expected one of {', '.join(VERBS)}")
        if "async_op" in named:
            raise UsageError("plan: pass async_op when you call the plan: plan(async_op=True)")
        self.group = group
        self.verb = VERBS[VERBS.index(verb)]  # the core compares names by their identity
        self._call: Callable[..., Any] = getattr(group, verb)
        bound = inspect.signature(self._call).bind(*args, **named)
        bound.apply_defaults()
        del bound.arguments["async_op"]
        self._given: Mapping[str, Any] = {name: _kept(value) for name, value in bound.arguments.items()}
        # Before the preparation, so that no change of the engine is missed.
        group._tell(self)
        self._prepare()

    def _make(self, async_op: bool) -> Work | None:
        """Make the call if the prepared call did not execute."""
        if not async_op:
            now = self._prepare()  # the tensors' memory may have moved, and the group may have another engine
            if now is not None and now():
                return None
        made: Work | None = self._call(**self._given, async_op=async_op)
        return made

    def __repr__(self) -> str:
        return f"<Plan: {self.verb} on group {self.group.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a plan belongs to its group, {self.group.name!r}, and cannot be pickled or copied.\n"
            "  Create a new plan with ProcessGroup.plan()."
        )

    def _prepare(self) -> Callable[[], bool] | None:
        now = self.group._prepare(self.verb, self._given)
        self._set(now)
        return now


def _kept(value: Any) -> Any:
    """Return a copy of a list of tensors, because the program may change its own list."""
    return [*value] if type(value) in (list, tuple) else value


publish(globals())
