"""The steps of a rank before, around and after the user's program.

A rank is a fork of the launcher, so it must restore everything that a fresh process would have: session, signals,
standard streams, ``sys.argv``, ``sys.path``, ``__main__``. The program then runs as the interpreter would run it, and
the interpreter itself ends the process: exit codes, ``atexit``, threads, and flushed files are python's own. ``--start
spawn`` instead executes this module in a fresh interpreter, which calls the same ``Rank.run``.

One behavior is added to a plain python: the rank reports an uncaught exception to the agent immediately, before
``atexit`` handlers run. These may take long, or make other ranks fail. The agent prints the exception, so the rank does
not.
"""

from __future__ import annotations

import ctypes
import dis
import errno
import faulthandler
import functools
import gc
import io
import os
import pkgutil
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Any

import msgspec

from allranks._base.console import printable
from allranks._base.errors import (
    AbortedError,
    AllranksError,
    ExcludedError,
    PeerLostError,
    StateLostError,
    TimeoutError,
    UsageError,
)
from allranks._base.forks import separate_from_siblings
from allranks._net.frames import FrameDecoder, pack_frame
from allranks._trace.offered_stacks import offer_stacks
from allranks._trace.stacks import DUMP, describe, is_own
from allranks.launch.ranks.pipes import Pipes
from allranks.launch.spec.events import FailureKind, FailureReport, RankProgress, RestartRank
from allranks.launch.spec.stdio import Stdio
from allranks.launch.spec.target import Kind, Target, is_collection, set_first_path

__all__ = ["Rank", "adopt_orphans", "become_rank", "decode_status", "die_with", "is_echo", "this_rank"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_Message = FailureReport | RestartRank | RankProgress | bytes
_decode: Callable[[bytes], _Message] = msgspec.msgpack.Decoder(_Message).decode
# A message may take several writes, so concurrent senders would mix their frames.
_sending = threading.Lock()
_this: Rank | None = None
_MAY_IGNORE = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# The launcher handles or blocks some of these signals; a rank starts with the dispositions of a fresh interpreter.
_DEFAULT = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD),
)


def become_rank(
    parent: int, pipes: Pipes, stdio: Stdio, close: tuple[int, ...], mask: Set[int], files: tuple[int, int]
) -> None:
    """Turn a fresh fork of the launcher into an independent process.

    Args:
        parent: the launcher's pid.
        pipes: the pipes to the launcher.
        stdio: settings of its standard streams.
        close: the launcher's descriptors, which are closed.
        mask: the signal mask to restore.
        files: the limits on open files to restore.
    """
    if stdio.terminal:
        # Only a process group of the launcher's session can become the foreground group of the terminal.
        os.setpgid(0, 0)
    else:
        # Outside of the terminal's session, Ctrl-C reaches the launcher only, which decides which ranks it signals.
        os.setsid()
    # fork clears PR_SET_PDEATHSIG (prctl(2)), so each rank sets it for itself.
    die_with(parent)
    # Duplicated, so that the loop that closes the sources does not close stdin itself.
    stdin = os.dup(0) if stdio.stdin else os.open(os.devnull, os.O_RDONLY)
    streams = (stdin, pipes.out, pipes.err)
    for number, fd in enumerate(streams):
        # dup2 makes the copies inheritable. The descriptors of ``Pipes`` are not.
        os.dup2(fd, number)
    for fd in {*streams, *close}:
        os.close(fd)
    ignored = {number for number in _MAY_IGNORE if signal.getsignal(number) is signal.SIG_IGN}  # nohup, sh -c "... &"
    for number in _DEFAULT:
        if number not in ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The launcher raised its own limit for the pipes of all ranks; programs get the user's limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    # Unblocked last: a signal that arrived since the fork meets the dispositions above, not the launcher's.
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent exits."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before prctl: no signal follows
        os._exit(1)


def adopt_orphans(on: bool) -> None:
    """Set whether this process, instead of init, adopts descendants whose parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def this_rank() -> Rank | None:
    """Return this process as a rank, if an agent has started it as one and is connected to it."""
    return _this if _this is not None and _this.pid == os.getpid() else None


@dataclass
class Rank:
    """This process as a rank.

    A program may close all descriptors, as daemons do. Their numbers may then belong to the program's own files, so
    nothing is written if the descriptor has changed.

    Attributes:
        target: the program to run.
        status: descriptor for the failure report, and for the result of a function.
        stacks: descriptor for the stacks of its threads, which a signal requests.
        pid: this process; a child that the program forks is not the rank.
    """

    target: Target
    status: int
    stacks: int
    pid: int

    def __post_init__(self) -> None:
        self._pipe = os.fstat(self.status).st_ino

    def execute(self, environ: Mapping[str, str], fresh: bool) -> None:
        """Replace this process by the target, or by an interpreter that will run it. Return only on failure.

        Args:
            environ: the rank's environment.
            fresh: run a python target in a fresh interpreter.
        """
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # python ignores them; a command must not inherit that
            signal.signal(number, signal.SIG_DFL)
        target = self.target
        argv = [target.name, *target.args]
        if fresh:
            # The fresh interpreter receives them by number, and makes them non-inheritable again.
            for fd in (self.status, self.stacks):
                os.set_inheritable(fd, True)
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            argv = [sys.executable, *flags, "-m", __name__, str(self.status), str(self.stacks), target.kind, *argv]
        try:
            os.execvpe(argv[0], argv, environ)
        except OSError as error:
            text = printable(f"cannot execute {argv[0]!r}: {error.strerror}\n")
            # 126: the exit code of a shell for a command that cannot be executed.
            self._send(FailureReport(126, text=text, at=time.monotonic()))
            os._exit(126)

    def adopt(self, environ: Mapping[str, str]) -> None:
        """Make a fork look like a fresh interpreter to the program.

        Args:
            environ: the rank's environment.
        """
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        # ``preload`` disabled collections until the fork, to keep the pages shared.
        gc.enable()
        separate_from_siblings()

    def run(self) -> int:
        """Run a python target as ``__main__``. An exception is reported, then raised again."""
        global _this
        _this = self
        target = self.target
        # faulthandler's handler is written in C, so it also reports a thread that blocks in C++.
        faulthandler.register(DUMP, self.stacks)
        offer_stacks()  # for the other ranks of this host, which report waits in torch's own backends
        sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr)  # type: ignore[misc]
        sys.argv = [target.name, *target.args]
        _set_orig_argv(target)
        sys.modules["__main__"] = main = ModuleType("__main__")
        if "__mp_main__" in sys.modules:  # multiprocessing sets it at import
            sys.modules["__mp_main__"] = main
        try:
            if target.kind == "function":
                self._call()
            elif target.kind == "module":
                set_first_path(os.getcwd())
                runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
            else:
                _run_script(target.name, main)
        except BaseException as error:
            # A Ctrl-C to all ranks at this moment would replace the report.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._failed(error)
            raise
        return 0

    def request_restart(self, request: RestartRank) -> None:
        """Request the launcher to restart a worker of this master."""
        self._send(request)

    def report_progress(self, progress: RankProgress) -> None:
        """Send the progress of this rank. Does nothing in a rank that runs a script: its launcher shows no bar."""
        if self.target.kind == "function":
            self._send(progress)

    def _call(self) -> None:
        from allranks.launch.ranks import function  # a late import: scripts do not need it

        fn, args, kwargs = function.unpack(self.target.payload)
        try:
            result = fn(*args, **kwargs)
        except SystemExit as error:
            # The launcher takes code 0 for success, but the caller waits for a result.
            if _exit_code(error) == 0:
                raise UsageError(
                    f"{self.target.name} called sys.exit(0) and returned nothing.\n  Return from it instead."
                ) from None
            raise
        for piece in function.pieces(function.pack_result(result)):
            if not self._send(piece):
                raise UsageError(
                    f"{self.target.name} closed the descriptor that transfers its result.\n"
                    "  Close only descriptors that it has opened."
                )

    def _failed(self, error: BaseException) -> None:
        # A child that the program forked also gets here; its failure is not the rank's.
        in_rank_process = os.getpid() == self.pid
        hook, trace = sys.excepthook, _own_frames(error.__traceback__)
        if hint := _needs_stdin(error, self.target.kind):
            shown: BaseException = UsageError(hint)
            error.__traceback__ = trace = _without_debugger(trace)
        else:
            shown = error
        is_torch_hook = (
            getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
        )  # its hook only adds a prefix
        plain = is_torch_hook or hook is sys.__excepthook__
        printed = in_rank_process and plain  # the agent prints the error
        # Code 0: the program called ``sys.exit(0)``, which is no failure.
        if in_rank_process and (report := _report(shown, trace, with_text=plain)).code:
            if self.target.kind == "function":
                from allranks.launch.ranks import function

                report = msgspec.structs.replace(report, error=function.pack_error(error))
            printed = self._send(report) and printed
        if printed:
            sys.excepthook = _print_nothing
        else:
            sys.excepthook = functools.partial(_call_hook, hook, error, shown, trace)

    def _send(self, message: _Message) -> bool:
        """Send a message to the agent. Return False if the program has closed the descriptor."""
        data = memoryview(pack_frame(msgspec.msgpack.encode(message)))
        with _sending:  # another thread of the program may report progress
            try:
                # The program may have closed the descriptor and reused its number for its own file.
                if os.fstat(self.status).st_ino != self._pipe:
                    return False
                while data:
                    data = data[os.write(self.status, data) :]
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                return False
        return True


def decode_status(frames: FrameDecoder) -> Iterator[_Message]:
    """Yield the complete messages of a rank: failure reports, progress reports, and pieces of a result."""
    while (frame := frames.next()) is not None:
        yield _decode(frame)


def is_echo(error: BaseException) -> bool:
    """Return True if an exception, its cause or its context is a ``PeerLostError`` or an ``AbortedError``."""
    todo, seen = [error], set()
    # An exception may refer to itself by its cause or context, so visited ones are skipped.
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        parts: tuple[BaseException, ...] = getattr(current, "exceptions", ())  # an exception group
        if isinstance(current, PeerLostError | AbortedError) or (parts and all(is_echo(part) for part in parts)):
            return True
        todo += [e for e in (current.__cause__, current.__context__) if e is not None]
    return False


def _unbuffered(stream: Any) -> io.TextIOWrapper:
    """Return an unbuffered stream, as with ``python -u``: the output of a killed rank is shown up to its last byte.

    The original stream stays open, because handlers of loggers may hold it.
    """
    # Loggers may write to the original stream, which must not hold complete lines back.
    stream.reconfigure(line_buffering=True)
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    raw.name = stream.name  # programs compare it with "<stdout>"
    made = io.TextIOWrapper(raw, stream.encoding, stream.errors, "\n", write_through=True)
    made.__dict__["mode"] = "w"  # as for any other text stream
    return made


def _set_orig_argv(target: Target) -> None:
    """Make ``sys.orig_argv`` start this program in a separate interpreter: programs use it to restart themselves."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if target.kind != "function":
        name = ["-m", target.name] if target.kind == "module" else [target.name]
        sys.orig_argv[:] = [sys.executable, *flags, *name, *target.args]


def _run_script(path: str, main: ModuleType) -> None:
    if is_collection(path):
        set_first_path(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    file = os.path.abspath(path)
    # The interpreter resolves symbolic links for ``sys.path[0]``, but not for ``__file__``.
    set_first_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = file
    main.__loader__ = SourceFileLoader("__main__", file)
    main.__dict__["__cached__"] = None
    with open(file, "rb") as source:
        if path.endswith(".pyc"):
            main.__loader__ = SourcelessFileLoader("__main__", file)
            code = pkgutil.read_code(source)
        else:
            # Without dont_inherit, the program would inherit ``annotations`` from this module's ``__future__`` import.
            code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)


_KINDS = (
    ((TimeoutError, PeerLostError), FailureKind.LATE),
    (ExcludedError, FailureKind.EXCLUDED),
    (StateLostError, FailureKind.STATE_LOST),
)


def _report(error: BaseException, trace: TracebackType | None, with_text: bool) -> FailureReport:
    echo, now = is_echo(error), time.monotonic()
    if isinstance(error, SystemExit):
        return FailureReport(_exit_code(error), echo=echo, at=now)
    summary = traceback.TracebackException(type(error), error, trace)
    _trim(error, summary)
    # Notes follow the message of an exception, but the source of a SyntaxError precedes its message.
    title = list(summary.format_exception_only())[-1 if isinstance(error, SyntaxError) else 0]
    return FailureReport(
        code=128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1,
        title=printable(title).partition("\n")[0],
        text=printable("".join(summary.format())) if with_text else "",
        where=_place(trace),
        echo=echo,
        interrupted=isinstance(error, KeyboardInterrupt),
        kind=next((kind for types, kind in _KINDS if isinstance(error, types)), FailureKind.OTHER),
        at=now,
    )


def _needs_stdin(error: BaseException, kind: Kind) -> str:
    """Return a hint if a debugger or ``input`` met the end of a stdin that this rank does not have; else ""."""
    # By name, because bdb is not imported unless the program uses a debugger.
    quits = type(error).__module__ == "bdb" and type(error).__name__ == "BdbQuit"
    # ``input`` raises this text; EOFErrors of files and of pickle have other texts.
    if not quits and not (isinstance(error, EOFError) and str(error) == "EOF when reading a line"):
        return ""
    if os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev:  # the rank has a stdin: the error is the program's own
        return ""
    rank, size, local_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    what = f"{'a debugger' if quits else 'input()'} reads from stdin, but stdin of rank {rank}"
    if kind == "function":
        return f"{what} is empty in allranks.run.\n  Use a script with `allranks run -n 1`."
    if size != local_size:
        return f"{what} is empty in jobs on several hosts.\n  Use one host, with `allranks run --stdin RANK`."
    if size == "1":
        return f"{what} is /dev/null, like stdin of the launcher.\n  Start the launcher from a terminal."
    return f"{what} is empty.\n  Use `allranks run --stdin {rank}`, or -n 1: a single rank has stdin of the launcher."


def _without_debugger(trace: TracebackType | None) -> TracebackType | None:
    """Remove the debugger's own frames, which are the innermost."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while len(frames) > 1 and os.path.basename(frames[-1].tb_frame.f_code.co_filename) in ("bdb.py", "pdb.py"):
        frames.pop()
    if frames:
        frames[-1].tb_next = None
    return frames[0] if frames else None


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    # The kernel keeps only the low 8 bits of an exit code.
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames between the interpreter and the program."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (file == __file__ or file == runpy.__file__ or file.startswith(("<frozen runpy", "<frozen importlib"))):
            break
        trace = trace.tb_next
    return trace


def _trim(error: BaseException, summary: traceback.TracebackException) -> None:
    """Remove frames of this package that raise errors on purpose: the user's last line is the helpful one."""
    todo, seen = [(error, summary)], set()
    while todo:
        current, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        stack = part.stack
        own_frames = next((n for n, frame in enumerate(reversed(stack)) if not frame.filename.startswith(_PACKAGE)), 0)
        if own_frames and (isinstance(current, AllranksError) or _is_raised(current.__traceback__)):
            del stack[-own_frames:]
        for link in ("__cause__", "__context__"):
            other, other_summary = getattr(current, link), getattr(part, link)
            if other is not None and other_summary is not None:
                todo.append((other, other_summary))


def _is_raised(trace: TracebackType | None) -> bool:
    """Return whether an exception comes from a ``raise`` in its innermost frame, not from a failed operation."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback that belongs neither to python, nor to a library, nor to allranks."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_own(frame.filename)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return printable(describe(frame.filename, frame.lineno, frame.name))


def _print_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace ``sys.excepthook``: the agent prints the traceback."""


def _call_hook(
    hook: Callable[..., Any],
    known: BaseException,
    shown: BaseException,
    own: TracebackType | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Call the program's own ``sys.excepthook`` with the program's own frames."""
    if error is known:
        hook(type(shown), shown.with_traceback(own), own)
    else:
        hook(kind, error, trace)


if __name__ == "__main__":
    assert __spec__ is not None
    sys.modules[__spec__.name] = sys.modules[__name__]  # so that ``this_rank`` is one function
    _status, _stacks = map(int, sys.argv[1:3])
    for _fd in (_status, _stacks):
        # A process that the program starts must not keep the agent's pipes from their end.
        os.set_inheritable(_fd, False)
    _kind, _name, *_args = sys.argv[3:]
    sys.exit(Rank(Target(_kind, _name, tuple(_args)), _status, _stacks, os.getpid()).run())  # type: ignore[arg-type]
