"""Observation of the first steps of a program, which makes later steps inexpensive.

The first steps at each place of a program are *learning steps*. State copies everything that it covers, commits at the
end of the ``with`` block, and compares the observations of the ranks. The result is a `StepPlan` for this place:
whether a step may be committed before the optimizer runs, and what it changes before that. The plan is the same on all
ranks. A process that replaces a lost rank receives it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from allranks._call.digests import digest, shard_of
from allranks._elastic.training.coverage import Coverage, plain_values
from allranks._elastic.training.reachable import Reached
from allranks._elastic.training.step_plan import StepPlan

__all__ = ["Learning", "merge"]


class Learning:
    """The observations of one learning step on this rank.

    Args:
        coverage: The parts.
        reached: The contents of the parts.

    Attributes:
        seconds: Duration of the last comparison in seconds.
        live_grads: The step adds to gradients of an earlier step.
    """

    def __init__(self, coverage: Coverage, reached: Reached) -> None:
        self._coverage = coverage
        self._reached = reached
        self._rebinds = False
        self.seconds = 0.0
        self._begin = self._detect(reached)
        self._versions = _versions(reached)
        self._boundary: dict[str, int] | None = None
        self._boundary_versions: dict[str, int] = {}
        self._calls = 0
        self._variables_then: dict[str, int] = {}
        self.live_grads = False
        self._grads = {name: p.grad for name, p in coverage.parameters().items() if p.grad is not None}
        self._hooks = [
            parameter.register_hook(self._sees_gradient(parameter))  # type: ignore[no-untyped-call]
            for parameter in coverage.parameters().values()
            if parameter.grad is not None and parameter.requires_grad and parameter.is_leaf
        ]

    def _detect(self, reached: Reached | None = None) -> dict[str, int]:
        started = time.perf_counter()
        now = reached or self._coverage.reached()
        self._rebinds = self._rebinds or any(
            now.tensors.get(name, tensor) is not tensor for name, tensor in self._reached.tensors.items()
        )
        found = _digests(self._coverage, now)
        self.seconds = time.perf_counter() - started
        return found

    def _sees_gradient(self, parameter: Any) -> Any:
        old = parameter.grad

        def hook(gradient: Any) -> None:
            # The hook runs before this gradient is added. An unchanged .grad is therefore that of an earlier step.
            # An all-zero gradient is the result of zero_grad(set_to_none=False), so nothing is accumulated.
            if parameter.grad is old and bool(old.any()):
                self.live_grads = True

        return hook

    def at_boundary(self, calls: int, variables: Mapping[str, Any]) -> None:
        """Record the state immediately before the first optimizer of the step runs.

        Args:
            calls: Number of calls that this process has finished so far.
            variables: Current values of the variables that the loop carries.
        """
        # Only the first optimizer counts: an early commit comes before it.
        if self._boundary is None:
            now = self._coverage.reached()
            self._boundary, self._boundary_versions = self._detect(now), _versions(now)
            self._calls = calls
            self._variables_then = {name: digest(value) for name, value in variables.items()}

    def close(self) -> None:
        """Remove the gradient hooks at the end of the step."""
        for hook in self._hooks:
            hook.remove()

    def report(self, calls: int, variables: Mapping[str, Any], complaints: Sequence[str]) -> dict[str, Any]:
        """Return the observations for the other ranks, at the end of the step.

        Args:
            calls: Number of calls that this process has finished so far.
            variables: Current values of the variables that the loop carries.
            complaints: See ``audit``.
        """
        self.close()
        reached = self._coverage.reached()
        end, versions = self._detect(reached), _versions(reached)
        boundary, boundary_versions = end, versions
        if self._boundary is not None:
            boundary, boundary_versions = self._boundary, self._boundary_versions
        now = {name: digest(value) for name, value in variables.items()}
        then = self._variables_then if self._boundary is not None else now
        after, written = _changed(boundary, end), _changed(boundary_versions, versions)
        # Hashes show the change, but version counters do not. After a loss, nothing would reveal such a change.
        unseen = {name for name in after - written if name in versions or name.endswith("{}")}
        return {
            "end": end,
            "before": sorted(_changed(self._begin, boundary) | _changed(self._versions, boundary_versions)),
            "after": sorted(after | written),
            "unseen": sorted(unseen),  # changed through .data, or plain values
            "boundary": self._boundary is not None,
            "calls": calls - self._calls if self._boundary is not None else 0,
            "variables": now,
            "variables after": sorted(name for name in now if then.get(name) != now[name]),
            "grads": self.live_grads,
            "rebinds": self._rebinds,
            "complaints": list(complaints),
        }


def _versions(reached: Reached) -> dict[str, int]:
    """Return the version counter of each tensor. It also counts writes that store an equal value."""
    return {
        f"{name}{shard_of(tensor)}": 0 if tensor.is_inference() else tensor._version
        for name, tensor in reached.tensors.items()
    }


def _changed(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    return {name for name, value in now.items() if value != before.get(name)}


def _digests(coverage: Coverage, reached: Reached) -> dict[str, int]:
    """Return hashes of all tensors, arrays, and containers of plain values, by name."""
    found = {f"{name}{shard_of(tensor)}": digest(tensor) for name, tensor in reached.tensors.items()}
    found |= {name: digest(array) for name, array in reached.arrays.items()}
    found |= {f"{name}{{}}": digest(plain_values(container)) for name, container in reached.containers.items()}
    found |= coverage.described()
    # The name of a shard identifies it, so only equal shards are compared between ranks.
    found |= {f"grad({n}){shard_of(p)}": digest(p.grad) for n, p in coverage.parameters().items() if p.grad is not None}
    return found


def merge(plan: StepPlan, reports: Sequence[Mapping[str, Any]], coverage: Coverage) -> list[str]:
    """Merge the observations of all ranks in a learning step into the plan. The result is the same on all ranks.

    Returns:
        The reasons why State cannot continue, as sentences for the user.
    """
    plan.steps += 1
    plan.boundaries += any(each["boundary"] for each in reports)
    before = {name for each in reports for name in each["before"]}
    after = {name for each in reports for name in each["after"]}
    complaints: list[str] = []
    for number, each in enumerate(reports):
        for sentence in each["complaints"]:
            if not any(sentence in known for known in complaints):
                complaints.append(f"rank {number}: {sentence}" if len(reports) > 1 else sentence)
    ends = [each["end"] for each in reports]
    names = set().union(*ends)
    differ = {name for name in names if len({end[name] for end in ends if name in end}) > 1}
    # Buffers may differ, such as running means of local batches. Backup ranks store them.
    own = {name for name in differ if name in coverage.buffers or name.startswith("own[")}
    grads = {name for name in names if name.startswith("grad(")}
    complaints += [_differs(name, coverage) for name in sorted(differ - own - grads) if coverage.must_agree(name)]
    plan.around |= _same_in_all([each["around"] for each in reports])
    plan.own |= own | {name for name in names if name.startswith("own[")}
    plan.grads |= any(each["grads"] for each in reports)
    plan.grads_differ |= bool(differ & grads)
    values = [each["variables"] for each in reports]
    carried = set().union(*values)
    plan.known |= carried
    plan.variables |= {name for name in carried if any(v.get(name) != values[0].get(name) for v in values[1:])}
    changed_late = {name for each in reports for name in each["variables after"]}
    # A loss after an early commit cannot be undone, so these actions require a commit at the end of the step.
    late = [
        *(["communicate"] if any(each["calls"] for each in reports) else []),
        *(f"change {name}" for name in sorted(after & plan.own)),
        *(f"assign {name.rpartition('.')[2]}" for name in sorted(changed_late & plan.variables)),
        *(
            ["clear accumulated gradients, which differ between ranks,"]
            if plan.grads and plan.grads_differ and plan.boundaries
            else []
        ),
    ]
    # The flag is never reset: a commit at the end of the step is always correct, and only costs copies.
    if late and not plan.late:
        plan.late, plan.why_late = True, f"{late[0]} after an optimizer's step()"
    seen = before | after if plan.late else before
    plan.saved |= {name for name in seen - grads if not name.endswith("{}")}
    plan.modules |= any(each["rebinds"] for each in reports) or any(
        name.endswith("{}") and not coverage.is_light(name.removesuffix("{}")) for name in seen
    )
    unseen = {name for each in reports for name in each["unseen"]} - coverage.buffers.keys()
    plan.unseen |= {name for name in unseen if not name.endswith("{}") or coverage.is_of_module(name)}
    plan.changing |= (before | after) & (plan.own | coverage.buffers.keys())
    return complaints


def _same_in_all(found: Sequence[Mapping[str, int]]) -> set[str]:
    return {name for name, value in found[0].items() if all(each.get(name) == value for each in found[1:])}


def _differs(name: str, coverage: Coverage) -> str:
    remedy = (
        "Average gradients before the optimizer runs, as DistributedDataParallel does."
        if coverage.is_trained(name)
        else "Reduce it over the ranks (all_reduce), or declare it as a tensor of each rank: State(own=[...]).\n"
        "  If the training does not depend on it, declare it: State(local=[...])."
    )
    name = name.removesuffix("{}")
    return f"{name} differs between ranks, so no rank can send the correct value to a replacement process.\n  {remedy}"
