"""Failures as callers get them: they keep nothing of the caller's alive, and show what is the caller's.

An exception refers to its traceback, that to every frame which it passed, and these to their locals: the
tree, its leaves, copies of them. Who keeps the exception of a save would keep the state of that save. And
once it was raised to a caller, it refers to the caller's frames, which may refer to the future that it came
from: a cycle.

Of the frames of an expected error, those between the function that the caller called and the place where the
error was found are tasks, threads and stages, some fifty that say nothing to a caller. The error says all in
its sentence. Where a handler, a stage or another function of the caller's fails, its frames stay.
`PENSTOCK_TRACEBACK=full` shows everything, and so does an error that penstock did not raise on purpose.
"""

from __future__ import annotations

__all__ = (
    "Failure",
    "FailureFuture",
    "ResultBox",
    "forget_locals",
    "forget_on_error",
    "short_traceback",
    "short_tracebacks",
    "without_frame",
)

import inspect
import opcode
import os
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, Generic, TypeVar, cast, final
from weakref import ref

from penstock.kernel.errors import HandlerFailedError, PenstockError, StageFailedError

_RESUMED: Final = (
    inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
)
"""Functions whose frames are left and come back to."""
_YIELD: Final = opcode.opmap["YIELD_VALUE"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def forget_locals(error: BaseException, until: BaseException | None = None) -> None:
    """Clear the locals of all frames that `error`, and what led to it, has passed and that have ended.

    The traceback stays as it is: files, lines and names. To be called where the error leaves the work: its
    frames are then those of that work, and of what the work called.

    Args:
        error: The failure.
        until: What was being handled when the work began. It is somebody else's, and so is what led to it.
    """
    known, due = {id(until), id(None)}, [error]
    while due:
        one = due.pop()
        if id(one) in known:
            continue

        known.add(id(one))
        passed = one.__traceback__
        while passed is not None:
            if not _is_suspended(passed.tb_frame, passed.tb_lasti):
                with suppress(RuntimeError):  # it is still being executed, such as the caller of this
                    passed.tb_frame.clear()

            passed = passed.tb_next

        due += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            due += cast("tuple[BaseException, ...]", one.exceptions)


def _is_suspended(frame: FrameType, left_at: int) -> bool:
    """Return whether a frame is of a coroutine that caught the error and awaits something else by now.

    To clear it would close the coroutine, wherever that is awaited. From Python 3.13 on that is refused.
    """
    at = frame.f_lasti
    code = frame.f_code
    return bool(code.co_flags & _RESUMED) and at not in (left_at, -1) and code.co_code[at] == _YIELD


def without_frame(error: E) -> E:
    """Return a failure that was just caught, without locals, and without the frame that caught it.

    That one goes on, and its locals are its own matter: frames below refer to it.
    """
    forget_locals(error)
    passed = error.__traceback__
    return error.with_traceback(None if passed is None else passed.tb_next)


@contextmanager
def forget_on_error() -> Generator[None]:
    """Let an error that leaves the block keep alive nothing that the calls inside had as locals.

    What the frame around it has is its own matter: it lets go of a caller's values before it enters.
    """
    before = sys.exception()
    try:
        yield
    except BaseException as error:
        forget_locals(error, before)
        raise
    finally:
        del before


@final
class Failure:
    """A failure that is raised to each caller, any number of times.

    As long as somebody has the exception that was raised last, the next one gets that, too. It is not kept
    here: it refers to the frames of callers. Then an equal one is made, with the first traceback.

    Args:
        error: A failure that no caller has seen yet.
    """

    __slots__ = ("_kept", "_last", "_traceback")

    def __init__(self, error: BaseException) -> None:
        self._kept = error
        self._last: ref[BaseException] | None = None
        self._traceback = error.__traceback__

    @property
    def error(self) -> BaseException:
        """The exception, to be looked at and neither raised nor kept."""
        return (None if self._last is None else self._last()) or self._kept

    def take(self) -> BaseException:
        """Return the exception to a caller, who may raise it."""
        error = self.error
        if error is self._kept:
            twin = _twin(error, self._traceback)
            if twin is not None:
                self._kept = twin
                with suppress(TypeError):  # built-in exceptions have no weak references
                    self._last = ref(error)

        return error

    def take_to_raise(self) -> BaseException:
        """Return it with its first traceback; otherwise that would grow each time."""
        return self.take().with_traceback(self._traceback)


class FailureFuture(Future[T]):
    """A future of `concurrent.futures` that keeps its exception as `Failure` does."""

    _failure: Failure | None = None

    def set_exception(self, exception: BaseException | None) -> None:
        assert exception is not None
        self.set_failure(Failure(exception))

    def set_failure(self, failure: Failure) -> None:
        """End with a failure, which other futures may share."""
        if not self.done():
            self._failure = failure

        super().set_result(cast("T", None))  # or that it is over already is raised

    def exception(self, timeout: float | None = None) -> BaseException | None:
        super().result(timeout)
        return None if self._failure is None else self._failure.take()

    def result(self, timeout: float | None = None) -> T:
        value = super().result(timeout)
        if self._failure is None:
            return value
        try:
            raise self._failure.take_to_raise()
        finally:
            del self  # the traceback refers to this frame


@final
class ResultBox(Generic[T]):
    """Awaits a call for callers in other threads or loops, and holds its result or its failure for them.

    What runs it, an event loop or a portal, gets neither: there an exception gets into a reference cycle. A
    cancellation is raised as it is.

    Args:
        call: Forgotten once it has begun.
    """

    __slots__ = ("_calls", "_error", "_value")

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._calls = [call]
        self._value: T | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        """Await the call."""
        try:
            self._value = await self._calls.pop()()
        except Exception as error:
            self._error = without_frame(error)

    def take(self) -> T:
        """Return the result, or raise the failure. To be called once, when `run` has ended."""
        (value, self._value), (error, self._error) = (self._value, None), (self._error, None)
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame


_OF_OSERROR: Final = ("errno", "strerror", "filename", "filename2")
_HEAP_TYPE: Final = 1 << 9  # of `type.__flags__`: a class that Python code made


def _twin(error: BaseException, traceback: Any) -> BaseException | None:
    """Return an exception that is equal in all but identity; None if that cannot be made."""
    kind = type(error)
    try:
        built_in: Any = kind  # of several bases the one whose memory is larger, such as OSError's
        while built_in.__flags__ & _HEAP_TYPE:
            built_in = built_in.__base__

        made: BaseException = built_in.__new__(kind, *error.args)
        made.args = error.args
        made.__dict__.update(error.__dict__)
        if isinstance(error, OSError):
            for name in _OF_OSERROR:
                value = getattr(error, name)
                if value is not None:
                    setattr(made, name, value)

        made.__cause__, made.__context__ = error.__cause__, error.__context__
        made.__suppress_context__ = error.__suppress_context__
        made.with_traceback(traceback)
        return made if str(made) == str(error) else None
    except Exception:  # a class of somebody else's, which is made in its own way
        return None


_SPECIAL: Final = frozenset(
    ("__init__", "__enter__", "__exit__", "__next__", "__aenter__", "__aexit__", "__anext__", "__call__")
)
_MACHINERY: Final = sys.stdlib_module_names | {
    "anyio", "jax", "jaxlib", "msgpack", "numpy", "obstore", "outcome", "penstock", "tensorstore", "trio",
    "uvloop",
}  # fmt: skip
"""Packages whose frames are not the caller's."""


def short_traceback(function: F) -> F:
    """Return a public function, or coroutine function, whose expected errors have short tracebacks."""
    if inspect.iscoroutinefunction(function):  # what is made is one too: libraries that try again ask for it

        async def run(*args: Any, **keywords: Any) -> Any:
            begun = function(*args, **keywords)
            del args, keywords  # what is kept of them is the function's matter
            try:
                return await begun
            except Exception as error:
                _shorten(error)
                raise

        return cast("F", wraps(function)(run))

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            _shorten(error)
            raise

    return cast("F", wraps(function)(call))


def short_tracebacks(cls: C) -> C:
    """Do that for the public methods which a class defines."""
    for name, member in list(vars(cls).items()):
        is_plain = isinstance(member, FunctionType) and not inspect.isasyncgenfunction(member)
        if is_plain and (name in _SPECIAL or not name.startswith("_")):
            setattr(cls, name, short_traceback(member))

    return cls


def _shorten(error: Exception) -> None:
    """Leave of the frames of an error, which was just caught, the public function's and the caller's."""
    passed = list(_entries(error))[1:]  # the first is that of the function above, which goes on
    callers = _from_callers_on(passed[1:])
    is_expected = isinstance(error, PenstockError)
    if not passed or not (is_expected or callers) or os.environ.get("PENSTOCK_TRACEBACK") == "full":
        return

    error.__traceback__ = _traceback_of([passed[0], *callers])
    if is_expected:
        _shorten_causes(error)


def _shorten_causes(error: BaseException) -> None:
    """Show of what led to an error what has frames of the caller's."""
    cause, context = error.__cause__, error.__context__
    if cause is None:
        if context is not None and not _from_callers_on(list(_entries(context))):
            error.__suppress_context__ = True
        return

    callers = _from_callers_on(list(_entries(cause)))
    if callers:
        cause.__traceback__ = _traceback_of(callers)
        _shorten_causes(cause)
    elif not isinstance(error, HandlerFailedError | StageFailedError):  # else the cause is the caller's own
        # It stays at hand in `__context__`, which is not printed.
        error.__cause__ = None
        error.__context__ = cause
        error.__suppress_context__ = True


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _from_callers_on(entries: list[TracebackType]) -> list[TracebackType]:
    """Return the entries from the first one on that is the caller's: what it called belongs to it."""
    for number, entry in enumerate(entries):
        if _is_callers(entry.tb_frame):
            return entries[number:]

    return []


def _is_callers(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _MACHINERY


def _traceback_of(entries: list[TracebackType]) -> TracebackType | None:
    found: TracebackType | None = None
    for entry in reversed(entries):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)

    return found
