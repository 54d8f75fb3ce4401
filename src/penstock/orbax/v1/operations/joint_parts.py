"""Saving a tree part by part from all processes of a job together."""

from __future__ import annotations

__all__ = ("JointFinalizing", "JointPart")

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, final

from anyio import fail_after, to_thread

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import ConfigError, InUseError
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.store_capabilities import Hold
from penstock.kernel.storage.holds import hold_alone, hold_with_readers
from penstock.kernel.storage.workspace import make_name_durable
from penstock.orbax.v0.common.joint_directory import is_publisher, job_options
from penstock.orbax.v1.common.operation import Operation
from penstock.orbax.v1.common.v1_errors import PartialSaveReplacementError
from penstock.orbax.v1.context.context import Context
from penstock.orbax.v1.operations.parts import (
    check_new,
    gathered_at,
    new_part_name,
    parts_in,
    saving_of_parts,
)
from penstock.orbax.v1.operations.saving import Saving, processes_of

T = TypeVar("T")

_REFUSALS: Final[Mapping[str, type[Exception]]] = {
    "exists": FileExistsError,
    "absent": FileNotFoundError,
    "in use": InUseError,
    "known": PartialSaveReplacementError,
}
"""What the primary refuses for all processes."""


@final
@dataclass(frozen=True, slots=True)
class JointPart:
    """Saves one part. The primary looks whether it may be saved, and chooses its name.

    Meanwhile the primary holds the parts, together with others who save one.
    """

    path: str
    leaves: Sequence[ParamInfo]  #: that no other part may have
    saving: Saving
    context: Context

    async def __call__(self, operation: Operation[None]) -> None:
        asked = [f"{leaf.key_path}\tsaved in this part" for leaf in self.leaves]
        question = _Question(f"a part of {self.path}", self.path, asked, self._begin)
        with fail_after(self.context.asynchronous.timeout_secs):
            async with _answered(question, self.context, self._named):
                await self.saving(operation)

    def _begin(self) -> tuple[Sequence[str], Hold]:
        _check_absent(self.path)
        gathered, store = gathered_at(self.path), LocalStore()
        check_new(gathered, self.leaves)
        store.make_directory(gathered)
        return [new_part_name(self.path)], hold_with_readers(store, gathered)

    async def _named(self, names: Sequence[str]) -> None:
        self.saving.path = os.path.join(gathered_at(self.path), names[0])


@final
@dataclass(frozen=True, slots=True)
class JointFinalizing:
    """Puts all parts together: each process maps what its devices held, and saves that as one tree.

    Meanwhile the primary holds the parts alone.
    """

    path: str
    context: Context

    async def __call__(self, operation: Operation[None]) -> None:
        question = _Question(f"finalize {self.path}", self.path, (), self._begin)
        with fail_after(self.context.asynchronous.timeout_secs):
            async with _answered(question, self.context, self._read) as saving:
                if saving is None:
                    return

                await saving(operation)
                if is_publisher(processes_of(self.context)):
                    await to_thread.run_sync(LocalStore().remove_tree, gathered_at(self.path))

    def _begin(self) -> tuple[Sequence[str], Hold]:
        _check_absent(self.path)
        gathered, store = gathered_at(self.path), LocalStore()
        if not os.path.isdir(gathered):
            raise FileNotFoundError(f"Partial save path {gathered} does not exist.")

        held = hold_alone(store, gathered)  # or a part is being saved
        try:
            names = [os.path.basename(part) for part in parts_in(gathered)]
            if not names:
                store.publish(store.begin_build(self.path, gathered))
                make_name_durable(store, self.path)
        except BaseException:
            held.release()
            raise

        return names, held

    async def _read(self, names: Sequence[str]) -> Saving | None:
        parts = [os.path.join(gathered_at(self.path), name) for name in names]
        return await saving_of_parts(self.path, parts, self.context) if parts else None


@final
@dataclass(frozen=True, slots=True)
class _Question:
    """What all processes ask, and the primary finds out."""

    about: str  #: tells it from other questions
    path: str  #: of the checkpoint
    asked: Sequence[str]  #: see `act_on_answer`
    find_out: Callable[[], tuple[Sequence[str], Hold]]  #: what it found, and what is held meanwhile. Blocking

    def __call__(self, held: list[Hold]) -> str:
        """Return the primary's answer as it is told; note what is held."""
        try:
            names, hold = self.find_out()
        except Exception as error:
            for refusal, kind in _REFUSALS.items():
                if isinstance(error, kind):
                    text = error.path if isinstance(error, InUseError) else str(error)
                    return json.dumps([refusal, [text]])

            raise

        held.append(hold)
        return json.dumps(["", names])


@asynccontextmanager
async def _answered(
    question: _Question, context: Context, act: Callable[[Sequence[str]], Awaitable[T]]
) -> AsyncGenerator[T]:
    """Yield what `act` makes of the primary's answer, which it does in all processes.

    Raises:
        OSError, PartialSaveReplacementError: In all processes, what the primary refuses.
        PeerError: If another process asks something else, failed, or does not come.
        ConfigError: If each process has a disk of its own there.
    """
    held: list[Hold] = []
    found: list[T] = []

    async def answer() -> str:
        return await to_thread.run_sync(question, held)

    async def act_unless_refused(said: str) -> Exception | None:
        refusal, told = json.loads(said)
        if refusal:
            return _REFUSALS[refusal](*told)

        found.append(await act(told))
        return None

    try:
        refused = await _together(question, context, answer, act_unless_refused)
        if refused is not None:
            raise refused

        yield found[0]
    finally:
        for hold in held:
            hold.release()


async def _together(
    question: _Question,
    context: Context,
    answer: Callable[[], Awaitable[str]],
    act: Callable[[str], Awaitable[T]],
) -> T:
    from penstock.orbax.joint.primary_answer import act_on_answer  # one process needs nothing of it

    async with Checkpointer(job=job_options(processes_of(context))) as checkpointer:
        engine = checkpointer.engine
        if engine.is_local(question.path):
            raise ConfigError("job.local_root", "parts are gathered in a directory that all processes see")

        operation = engine.coordinator.operation(question.about)
        assert operation is not None, "`saves_jointly` has seen several processes"
        return await act_on_answer(operation, question.asked, answer, act)


def _check_absent(path: str) -> None:
    if os.path.exists(path):
        raise FileExistsError(f"Finalized checkpoint already exists at {path}.")
