from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import pytest

from penstock.errors import ConfigError, PipelineError, SpecError
from penstock.kernel import Actor, Milestone, Pipeline, Slot, run_pipeline
from penstock.kernel.pipeline.stage import FunctionStage

pytestmark = pytest.mark.anyio


async def double(message: int) -> int:
    return 2 * message


async def plus_one(message: int) -> int:
    return message + 1


@final
@dataclass(frozen=True, slots=True)
class AddSome:
    """A stage with an option."""

    amount: int = 10
    concurrency: int = 1

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        async def add(message: int) -> int:
            return message + self.amount

        yield add


PLAIN: Pipeline[Any] = Pipeline(
    (
        Slot("first", FunctionStage(plus_one), Milestone.PLANNED),
        Slot("second", FunctionStage(double), Milestone.STAGED, queue=3),
        Slot("third", FunctionStage(plus_one), Milestone.WRITTEN),
    )
)


@pytest.fixture(autouse=True)
def plain_is_never_changed() -> object:
    before = PLAIN.slots
    yield
    assert PLAIN.slots is before
    assert PLAIN.names == ("first", "second", "third")


async def value(pipeline: Pipeline[Any], message: int = 1) -> object:
    return (await run_pipeline(pipeline, None, message)).value


def milestones(pipeline: Pipeline[Any]) -> dict[str, Milestone | None]:
    return {slot.name: slot.milestone for slot in pipeline}


async def test_a_pipeline_is_a_sequence_of_named_stages() -> None:
    assert len(PLAIN) == 3
    assert PLAIN.names == ("first", "second", "third")
    assert [slot.name for slot in PLAIN] == ["first", "second", "third"]
    assert PLAIN["second"] == FunctionStage(double)
    assert await value(PLAIN) == 5
    assert Pipeline(PLAIN.slots) == PLAIN


async def test_a_replaced_stage_keeps_its_place_name_queue_and_milestone() -> None:
    for stage, result in ((AddSome(), 13), (plus_one, 4)):
        changed = PLAIN.replace("second", stage)

        assert changed.names == PLAIN.names
        assert changed.slots[1].milestone is Milestone.STAGED
        assert changed.slots[1].queue == 3
        assert await value(changed) == result


async def test_stages_and_functions_are_inserted_under_names_made_from_their_own() -> None:
    before = PLAIN.insert_before("second", AddSome())
    after = PLAIN.insert_after("second", AddSome())
    function = PLAIN.insert_after("third", plus_one)

    assert before.names == ("first", "add_some", "second", "third")
    assert after.names == ("first", "second", "add_some", "third")
    assert function.names == ("first", "second", "third", "plus_one")
    assert [await value(changed) for changed in (before, after, function)] == [25, 15, 6]
    assert PLAIN.insert_before("first", double).names[0] == "double"
    assert milestones(before) == {**milestones(PLAIN), "add_some": None}


def test_a_name_may_be_given_and_must_be_where_two_would_be_the_same() -> None:
    changed = PLAIN.insert_after("first", double, called="again")

    assert changed.names == ("first", "again", "second", "third")
    with pytest.raises(PipelineError, match=r"^two stages are called 'double'$"):
        PLAIN.insert_after("first", double).insert_after("third", double)

    with pytest.raises(PipelineError, match=r"^two stages are called 'third'$"):
        PLAIN.insert_after("first", double, called="third")


def test_a_callable_without_a_name_is_called_after_its_type() -> None:
    assert PLAIN.insert_after("first", functools.partial(double)).names[1] == "partial"


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("first", {"second": Milestone.STAGED, "third": Milestone.WRITTEN}),
        ("second", {"first": Milestone.STAGED, "third": Milestone.WRITTEN}),
        ("third", {"first": Milestone.PLANNED, "second": Milestone.WRITTEN}),
    ],
)
def test_without_a_stage_its_milestone_passes_to_the_one_before(
    gone: str, left: dict[str, Milestone]
) -> None:
    assert milestones(PLAIN.without(gone)) == left


async def test_a_stage_left_out_that_has_no_milestone_takes_none_away() -> None:
    changed = PLAIN.insert_after("first", double).without("double")

    assert changed == PLAIN
    assert await value(changed) == 5


def test_an_unknown_stage_is_an_error_that_names_those_there_are() -> None:
    for change in (
        lambda: PLAIN.replace("fourth", double),
        lambda: PLAIN.insert_before("fourth", double),
        lambda: PLAIN.insert_after("fourth", double),
        lambda: PLAIN.without("fourth"),
        lambda: PLAIN.configure("fourth", amount=1),
        lambda: PLAIN["fourth"],
    ):
        with pytest.raises(PipelineError, match=r"'fourth'; there are first, second, third$") as caught:
            change()

        assert isinstance(caught.value, SpecError)


def test_an_unknown_stage_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(PipelineError, match=r"^no stage is called 'secnod'; did you mean 'second'\?$"):
        PLAIN.without("secnod")


@pytest.mark.parametrize("stage", [AddSome, 3, None, "double"])
def test_what_is_neither_a_stage_nor_a_function_is_refused(stage: object) -> None:
    with pytest.raises(PipelineError, match=r"class|neither"):
        PLAIN.replace("second", cast("Any", stage))


def test_two_stages_of_one_name_and_a_negative_queue_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"^two stages are called 'first'$"):
        Pipeline((*PLAIN.slots, PLAIN.slots[0]))

    with pytest.raises(PipelineError, match="'x' cannot hold -1"):
        Slot("x", FunctionStage(double), queue=-1)


async def test_options_of_a_stage_are_changed_by_name() -> None:
    adding = PLAIN.replace("second", AddSome())

    assert await value(adding.configure("second", amount=5)) == 8
    assert await value(adding.configured({"second": {"amount": 6}})) == 9
    assert adding["second"] == AddSome()


def test_options_that_are_not_there_are_refused() -> None:
    adding = PLAIN.replace("second", AddSome())
    with pytest.raises(ConfigError, match=r"second\.amuont: no such option; did you mean second\.amount"):
        adding.configure("second", amuont=5)

    @final
    class NoOptions:
        concurrency = 1

        @asynccontextmanager
        async def open(self, run: object, /) -> AsyncGenerator[Actor]:
            yield double

    with pytest.raises(PipelineError, match="'second' is not a dataclass"):
        PLAIN.replace("second", NoOptions()).configure("second", amount=5)


def test_a_pipeline_and_its_slots_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.slots = ()  # type: ignore[misc]  # the point of the test

    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.slots[0].name = "x"  # type: ignore[misc]  # the point of the test
