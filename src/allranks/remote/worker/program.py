"""A captured step on a worker: its frames become one Python function, whose tensors are local variables.

A step consists of many small operations. Their cost, in addition to the operators, is the decoding of frames and the
look-up of ids. Both are done once here. Each operation is one line of the function. If an operation fails, the line
number identifies it, and the remaining frames are run one by one, like frames from the master.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from allranks.remote.protocol import wire
from allranks.remote.worker.generated import program_function
from allranks.remote.worker.state import WorkerState
from allranks.remote.worker.template import CallTemplate, Code, Slots

__all__ = ["compile_program"]


class _Step(NamedTuple):
    template: CallTemplate
    at: int  # position of the ids in the frames
    line: int
    frees: list[int]


def compile_program(worker: WorkerState, program: wire.RemoteProgram, table: dict[int, CallTemplate]) -> CallTemplate:
    """Return a captured step as a template.

    Args:
        worker: The worker that runs it.
        program: The step.
        table: The current templates, which the step uses. The master may reuse their numbers later.
    """
    space: dict[str, Any] = {}
    lines = [f"v{each} = S[{id}]" for each, id in program.fixed.items()]
    steps: list[_Step] = []
    frames, at, line = program.frames, 0, 0
    before = len(lines)
    while at < len(frames):
        (number,) = wire.HEAD.unpack_from(frames, at)
        if number == wire.LINE:
            (line,) = struct.unpack_from("<I", frames, at + 2)
            at += 6
        elif number == wire.FREE:
            (count,) = wire.HEAD.unpack_from(frames, at + 2)
            freed = struct.unpack_from(f"<{count}I", frames, at + 4)
            gone = f"del {', '.join(f'v{each}' for each in freed)}"
            gone += "".join(f"; S.pop({program.fixed[each]}, None)" for each in freed if each in program.fixed)
            if steps:
                steps[-1].frees.extend(freed)
                # On the line of the last use, so that each operation is still one line of the function.
                lines[-1] += f"; {gone}"
            else:
                lines.append(gone)
                before += 1
            at += 4 + 4 * count
        else:
            template = table[number]
            assert template.code is not None
            steps.append(_Step(template, at + 2, line, []))
            lines.append(_line(template, template.code, frames, at + 2, space, len(steps)))
            at += 2 + template.nbytes
    results = "".join(f"v{each}, " for each in (*program.outputs, *program.kept))
    fast = program_function(program.inputs, lines, results, space)
    layout = struct.Struct(f"<{len(program.inputs) + len(program.outputs)}I")
    inputs, kept = len(program.inputs), tuple(program.kept.values())

    site = worker.site("a captured step")

    def run(slots: Slots, buffer: Any, at: int) -> None:
        worker.doing[0] = site
        ids = layout.unpack_from(buffer, at)
        try:
            made = fast(slots, *[slots[each] for each in ids[:inputs]])
        except Exception as error:  # noqa: BLE001 - operations that use the result report it
            own = _resume(worker, error, fast.__code__, before, steps, frames)
            made = [own[each] for each in (*program.outputs, *program.kept)]
        slots.update(zip((*ids[inputs:], *kept), made, strict=True))

    return CallTemplate("a captured step", inputs, len(program.outputs), layout.size, (), run)


def _line(template: CallTemplate, code: Code, frames: bytes, at: int, space: dict[str, Any], step: int) -> str:
    values = code.layout.unpack_from(frames, at)
    ids, numbers = values[: template.inputs + template.outputs], values[template.inputs + template.outputs :]
    names = [f"n{step}_{each}" for each in range(len(numbers))]
    space.update(code.space, **dict(zip(names, numbers, strict=True)))
    local = [f"v{each}" for each in ids]
    return code.text.format(i=local[: template.inputs], o=local[template.inputs :], n=names)


def _resume(worker: WorkerState, error: Exception, code: Any, before: int, steps: list[_Step], frames: bytes) -> Slots:
    """Continue after a failed operation. Return the program's tensors, and poison, at its end."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    # The step failed before its first operation, for example because an input is missing. Nothing can be resumed.
    if trace is None or trace.tb_lineno < before + 2:
        raise error
    failed = trace.tb_lineno - before - 2  # subtracts the `def` line, and the lines before the first operation
    own: Slots = {int(name[1:]): each for name, each in trace.tb_frame.f_locals.items() if name[0] == "v"}
    trace.tb_frame.clear()  # the exception would keep the step's tensors alive
    line = worker.line
    for number, step in enumerate(steps[failed:]):
        worker.line = step.line  # faults report this call site
        if number:
            try:
                step.template.run(own, frames, step.at)
            except Exception as another:  # noqa: BLE001 - operations that use the result report it
                worker.fail(step.template, own, frames, step.at, another)
        else:
            worker.fail(step.template, own, frames, step.at, error)
        for each in step.frees:
            own.pop(each, None)
    worker.line = line
    return own
