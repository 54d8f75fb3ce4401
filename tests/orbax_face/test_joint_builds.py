"""A save that handlers make in several processes, and the saves of trees within it."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import CancelScope, Event, create_task_group, wait_all_tasks_blocked

from penstock import Progress, SaveFuture
from penstock import orbax as ocp
from penstock.blocking import LoopHandle
from penstock.checkpointer.save_future import SavePromise
from penstock.directory_builds import JointBuild
from penstock.errors import OutcomeUnknownError, PeerFailedError

pytestmark = pytest.mark.anyio


class Within:
    """A save of a tree that begins at once."""

    def __init__(self, scope: CancelScope | None = None) -> None:
        self.n_cancelled = 0
        self.promise = SavePromise("/run/place/tree", self._cancel, lambda: Progress(0, 0, 0, 0))
        self.future = self.promise.future
        self._scope = scope

    def _cancel(self) -> None:
        self.n_cancelled += 1

    async def begin(self) -> SaveFuture:
        if self._scope is not None:
            self._scope.cancel()

        return self.future


async def end(build: JointBuild) -> None:
    """End it as a handler that raises does."""
    build.fail(LookupError("no such thing"))
    with pytest.raises(LookupError):
        await build.wait_written()


async def test_a_save_within_one_that_ends_is_cancelled_and_its_failure_is_nobodys() -> None:
    build, tree = JointBuild(), Within()
    assert await build.begin_within(tree.begin) is tree.future
    await end(build)
    assert tree.n_cancelled == 1

    tree.promise.fail(PeerFailedError(1, "write", None, "it was cancelled"))
    assert tree.promise.error_unseen is None


async def test_a_tree_whose_begin_was_cancelled_is_cancelled() -> None:
    build, scope = JointBuild(), CancelScope()
    tree = Within(scope)
    with scope:
        await build.begin_within(tree.begin)

    assert scope.cancelled_caught
    await end(build)
    assert tree.n_cancelled == 1


async def test_the_failure_of_a_tree_by_itself_is_known() -> None:
    build, tree = JointBuild(), Within()
    await build.begin_within(tree.begin)
    tree.promise.fail(PeerFailedError(1, "write", "x", "no space"))
    assert isinstance(tree.promise.error_unseen, PeerFailedError)


def caused_by(error: Exception) -> Exception:
    failure = ValueError("a handler of the caller's")
    failure.__cause__ = error
    return failure


CANCELLED = PeerFailedError(1, "write", None, "it was cancelled")


@pytest.mark.parametrize(
    "error", [CANCELLED, caused_by(CANCELLED), OutcomeUnknownError("/run/1/tree", "process 0 fell silent", 0)]
)
async def test_the_failure_within_a_nested_save_is_reported_first(error: Exception) -> None:
    build, scope = JointBuild(), CancelScope()
    failed: list[BaseException] = []

    async def wait() -> None:
        with scope:
            try:
                await build.wait_written()
            except Exception as error:
                failed.append(error)

    async with create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_all_tasks_blocked()
        build.fail(error)
        told = Event()
        LoopHandle().post(told.set)  # behind what `fail` has posted
        await told.wait()
        await wait_all_tasks_blocked()
        scope.cancel()  # as the verdict of the other process does

    assert scope.cancelled_caught
    assert failed == []


async def test_a_joint_build_that_reports_nothing_ends_with_the_known_failure() -> None:
    build, error = JointBuild(telling_s=0.0), PeerFailedError(1, "write", None, "it was cancelled")
    build.fail(error)
    with pytest.raises(PeerFailedError) as raised:
        await build.wait_written()

    assert raised.value is error


def test_a_handler_that_cannot_be_closed_keeps_no_other_one_open() -> None:
    closed: list[str] = []

    class Closing(ocp.JsonCheckpointHandler):
        def __init__(self, name: str, *, fails: bool) -> None:
            super().__init__()
            self._name, self._fails = name, fails

        def close(self) -> None:
            closed.append(self._name)
            super().close()
            if self._fails:
                raise LookupError(self._name)

    items: dict[str, Any] = {
        "a": Closing("a", fails=True),
        "b": Closing("b", fails=True),
        "c": Closing("c", fails=False),
    }
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items))
    with pytest.raises(LookupError):
        checkpointer.close()

    assert sorted(closed) == ["a", "b", "c"]
