from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Self
from weakref import ref

import pytest
from anyio import Event, create_task_group, wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from penstock.errors import DestinationExistsError, PenstockError, StorageError
from penstock.kernel import errors
from penstock.kernel.pipeline.failures import (
    Failure,
    FailureFuture,
    forget_locals,
    forget_on_error,
    short_traceback,
    without_frame,
)


class Value:
    """What a frame has."""


@pytest.fixture(autouse=True)
def _collector_off() -> Generator[None]:
    gc.disable()
    yield
    gc.enable()


def failing(value: Value) -> None:
    inner = value
    try:
        dict[str, int]()["first"]
    except KeyError as error:
        raise StorageError("write", "/c", "boom") from error
    finally:
        assert inner is value


def failed() -> tuple[StorageError, ref[Value]]:
    """A failure whose frames hold a value that nothing else does."""
    values = [Value()]
    reference = ref(values[0])
    try:
        failing(values.pop())
    except StorageError as error:
        return error, reference

    raise AssertionError


def test_a_traceback_without_locals_still_tells_the_way() -> None:
    error, value = failed()
    assert value() is not None
    forget_locals(error)

    assert value() is None
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["failed", "failing"]


def test_what_was_being_handled_before_is_left_alone() -> None:
    own, value = failed()
    try:
        raise own
    except StorageError:
        with suppress(KeyError), forget_on_error():
            dict[str, int]()["while it is handled"]

    assert value() is not None


def test_a_block_lets_an_error_pass_and_what_it_called_go() -> None:
    values = [Value()]
    value = ref(values[0])
    with pytest.raises(StorageError) as caught, forget_on_error():
        failing(values.pop())

    assert value() is None
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_traceback_of_a_caught_failure_begins_below_who_caught_it() -> None:
    def work() -> BaseException:
        values = [Value()]
        value.append(ref(values[0]))
        try:
            failing(values.pop())
        except StorageError as error:
            return without_frame(error)

        raise AssertionError

    value = list[ref[Value]]()
    error = work()
    assert value[0]() is None
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["failing"]


def told(failure: Failure) -> ref[Value]:
    """Have a frame hear of a failure, which holds the failure and a value."""
    mine = Value()
    with suppress(PenstockError):
        raise failure.take_to_raise()

    return ref(mine)


def test_a_failure_that_was_raised_keeps_no_frame_of_who_heard_it() -> None:
    failure = Failure(failed()[0])
    assert told(failure)() is None
    assert told(failure)() is None


def test_who_asks_again_gets_the_same_exception_while_somebody_has_it_and_an_equal_one_later() -> None:
    failure = Failure(failed()[0])
    first = failure.take()
    assert failure.take() is first
    told_first = str(first), vars(first), type(first)
    del first
    again = failure.take()
    assert (str(again), vars(again), type(again)) == told_first


def made(name: str) -> Any:
    """An error of a class, made of texts where they can be; else None."""
    class_: Any = getattr(errors, name)
    parameters = list(inspect.signature(class_.__init__).parameters.values())[1:]
    needed = [one for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    with suppress(AttributeError):
        return class_(*["x"] * len(needed))

    return None


NAMES = [name for name in errors.__all__ if isinstance(made(name), PenstockError)]


@pytest.mark.parametrize("name", NAMES)
def test_every_error_of_ours_can_be_made_again(name: str) -> None:
    error = made(name)
    error.add_note("in a stage")
    error.__cause__ = KeyError()
    expected = str(error), vars(error).copy(), getattr(error, "errno", None), type(error), error.__cause__
    reference, failure = ref(error), Failure(error)
    del error
    failure.take()

    assert reference() is None
    again = failure.take()
    assert (str(again), vars(again), getattr(again, "errno", None), type(again), again.__cause__) == expected


class OddError(Exception):
    """One that cannot be made from its arguments."""

    def __new__(cls, first: int, second: int) -> Self:
        return super().__new__(cls, first + second)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first + second}")


def test_an_error_that_cannot_be_made_again_is_kept() -> None:
    error = OddError(1, 2)
    failure = Failure(error)
    assert failure.take() is error
    assert failure.take() is error


@pytest.mark.parametrize("error", [OSError(2, "no", "f"), KeyError("a"), ValueError("b")])
def test_built_in_errors_can_be_made_again(error: Exception) -> None:
    failure = Failure(error)
    assert failure.take() is error
    assert str(failure.take()) == str(error)


def test_a_future_raises_its_failure_any_number_of_times() -> None:
    future = FailureFuture[int]()
    future.set_exception(DestinationExistsError("/c"))
    for _ in range(3):
        with pytest.raises(DestinationExistsError):
            future.result(0)

    assert isinstance(future.exception(0), DestinationExistsError)
    other = FailureFuture[int]()
    other.set_result(3)
    assert (other.result(0), other.exception(0)) == (3, None)


@pytest.mark.anyio
async def test_a_coroutine_that_caught_the_error_and_goes_on_is_left_alone() -> None:
    caught, may_end, ended = list[StorageError](), Event(), Event()

    async def catch() -> None:
        try:
            await failing_later()
        except StorageError as error:
            caught.append(error)

        await may_end.wait()
        ended.set()

    async with create_task_group() as tasks:
        tasks.start_soon(catch)
        await wait_all_tasks_blocked()
        forget_locals(caught[0])
        may_end.set()

    assert ended.is_set()


async def failing_later() -> None:
    await checkpoint()
    raise StorageError("write", "/c", "boom")


def test_an_unexpected_error_is_shown_whole() -> None:
    names: dict[str, Any] = {"__name__": "penstock.example"}
    exec("def inner():\n    raise RuntimeError('a bug')\n\ndef outer():\n    inner()\n", names)
    with pytest.raises(RuntimeError) as caught:
        short_traceback(names["outer"])()

    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["outer", "inner"]
