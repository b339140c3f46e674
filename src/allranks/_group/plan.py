"""Plan: a call of a group that is prepared once and made many times, as MPI's persistent collectives.

What a call costs Python is to look at its arguments. A plan has looked at them. Where its engine can prepare the call
(``Engine.prepare``), the core keeps all that it needs; elsewhere a plan makes the ordinary call.

A plan stays valid whatever happens to its group: the group tells its plans when it gets another engine, or none. They
then prepare themselves again when they are next called, or raise what an ordinary call would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks._core import Planned

if TYPE_CHECKING:
    from allranks._call.work import Work
    from allranks._group.process_group import ProcessGroup

__all__ = ["VERBS", "Plan"]

VERBS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
"""What can be planned."""


class Plan(Planned):
    """A call that ``ProcessGroup.plan`` has prepared: ``plan()`` makes it, on the tensors that it was prepared with.

    ``plan(async_op=True)`` returns at once, with a Work. The call is the same, for the other ranks too, as that of the
    group's method with the plan's arguments, and raises the same errors.

    Attributes:
        group: whose call it is.
        verb: its name.
    """

    __slots__ = ("__weakref__", "_call", "_given", "group", "verb")

    def __init__(self, group: ProcessGroup, verb: str, *args: Any, **named: Any) -> None:
        super().__init__()
        if verb not in VERBS:
            raise UsageError(f"plan: {verb!r} is none of the verbs that can be planned: {', '.join(VERBS)}")
        if "async_op" in named:
            raise UsageError("plan: async_op is given when the plan is called: plan(async_op=True)")
        self.group = group
        self.verb = VERBS[VERBS.index(verb)]  # the core compares names by their identity
        self._call: Callable[..., Any] = getattr(group, verb)
        bound = inspect.signature(self._call).bind(*args, **named)
        bound.apply_defaults()
        del bound.arguments["async_op"]
        self._given: Mapping[str, Any] = {name: _kept(value) for name, value in bound.arguments.items()}
        group._tell(self)
        self._prepare()

    def _make(self, async_op: bool) -> Work | None:
        """The call, where what has been prepared did nothing."""
        if not async_op:
            now = self._prepare()  # memory may lie elsewhere, and the group may have another engine
            if now is not None and now():
                return None
        made: Work | None = self._call(**self._given, async_op=async_op)
        return made

    def __repr__(self) -> str:
        return f"<Plan: {self.verb} on group {self.group.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a plan belongs to its group, {self.group.name!r}, and cannot be pickled or copied")

    def _forget(self) -> None:
        """The group has another engine, or none."""
        self._set(None)

    def _prepare(self) -> Callable[[], bool] | None:
        now = self.group._prepare(self.verb, self._given)
        self._set(now)
        return now


def _kept(value: Any) -> Any:
    """Of a list of tensors a copy: the program may change its own."""
    return [*value] if type(value) in (list, tuple) else value


publish(globals())
