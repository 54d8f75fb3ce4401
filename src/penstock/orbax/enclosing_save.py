"""The save that a handler is called in: where several processes write, and which files a step may share.

Handlers find it by context variables, and not by what they are given: a user's handler calls those of trees
with paths that it makes.
"""

from __future__ import annotations

__all__ = (
    "JointDirectory",
    "SameFile",
    "StepLinks",
    "described_json",
    "described_message",
    "joint_build_around",
    "joint_place",
    "links_in_force",
    "writes_what_is_whole",
)

import hashlib
import json
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from penstock.embedding import JointBuild, file_names
from penstock.orbax.item_files import path_text


@final
@dataclass(frozen=True)
class JointDirectory(os.PathLike[str]):
    """The place of a whole checkpoint that a handler saves: with the other processes, or to a bucket.

    Nothing is there yet: it appears in one step, when all have written. On a disk, a handler of a job of one
    process gets a directory instead, which exists, and which its checkpointer publishes.
    """

    path: str  #: of the checkpoint
    overwrite: bool  #: whether what is there may be replaced
    custom_metadata: Mapping[str, Any] | None  #: JSON values kept with the checkpoint
    jointly: bool = True  #: whether the other processes of the job save there, too
    begun: threading.Event = field(
        default_factory=threading.Event, compare=False, repr=False
    )  #: once the others know of it

    def __fspath__(self) -> str:
        return self.path


@contextmanager
def joint_place(build: JointBuild) -> Generator[None]:
    """Make it known to handlers that are called inside that all processes call them, for files of a build."""
    token = _IN_FORCE.set(build)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def joint_build_around(directory: Any) -> JointBuild | None:
    """Return the build that a directory belongs to; None if this process writes into it by itself."""
    build = _IN_FORCE.get()
    if build is None:
        return None

    path = os.path.abspath(path_text(directory))
    return build if path == build.place or path.startswith(build.place + os.sep) else None


def writes_what_is_whole(directory: Any) -> bool:
    """Return whether this process writes what every process has whole: of several, the primary does."""
    build = joint_build_around(directory)
    return build is None or build.is_primary


_IN_FORCE: Final[ContextVar[JointBuild | None]] = ContextVar("penstock.orbax.joint_build", default=None)

SHOWN: Final = 200
"""Characters of a value that the other processes get as they are."""


def described_json(value: Any) -> str:
    """Describe a JSON value; any other in no detail, since its handler refuses it."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return "JSON"

    return f"JSON {text if len(text) <= SHOWN else f'{text[:SHOWN]}… {_digest(text.encode())}'}"


def described_message(message: Any) -> str:
    """Describe a protobuf message."""
    return f"a message {_digest(message.SerializeToString(deterministic=True))}"


def _digest(data: bytes) -> str:
    return f"with the SHA-256 {hashlib.sha256(data).hexdigest()}"


SameFile: TypeAlias = Callable[[], bool]


@final
class _JointStep:
    """A directory that several processes save, and the call to make when it has its own path."""

    def __init__(self, built: str, path: str, tell: Callable[[str, SameFile], object]) -> None:
        self._built = built
        self._path = path
        self._tell = tell
        self._held: int | None = None

    def hold(self) -> None:
        # What is open keeps its inode number: nothing else that comes to be there is taken for it.
        with suppress(OSError):
            self._held = os.open(self._built, os.O_RDONLY | os.O_DIRECTORY)

    def published(self) -> None:
        if self._held is not None:
            self._tell(self._path, self._is_same)

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _is_same(self) -> bool:
        try:
            return self._held is not None and os.path.samestat(os.fstat(self._held), os.stat(self._path))
        except OSError:
            return False


@final
class StepLinks:
    """A step that is being saved, and the one whose files it may share.

    Args:
        step: The path that it will have.
        base: The path of the other one; None if there is none.
        hold: Called when it is about to get that path; holds the directory of the steps.
    """

    def __init__(self, step: str, base: str | None, hold: Callable[[], object] = lambda: None) -> None:
        self._step = step
        self._base = base
        self._hold = hold
        self._saved: list[tuple[str, str, Callable[[str, str], object]]] = []
        self._together: list[_JointStep] = []

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Make it known to handlers that are called inside."""
        token = _LINKS.set(self)
        try:
            yield
        finally:
            _LINKS.reset(token)

    def base_of(self, directory: str) -> str | None:
        """Return the directory of the base that matches one being saved; None if it has none."""
        path = self._in_base(self._item(directory))
        return path if path is not None and os.path.isdir(path) else None

    def base_of_place(self, place: str, directory: str) -> str | None:
        """Return the directory of the base that matches one in a place that several processes fill.

        It may be missing there.
        """
        return self._in_base(self._item_in(place, directory))

    def when_complete(self, directory: str, tell: Callable[[str, str], object]) -> None:
        """Call `tell` once the step is complete.

        Args:
            directory: That is being saved.
            tell: Takes its path then, and the one that it will have.
        """
        item = self._item(directory)
        if item is not None:
            built = os.path.join(os.path.dirname(directory), item)
            self._saved.append((built, os.path.join(self._step, item), tell))

    def when_published(self, place: str, directory: str, tell: Callable[[str, SameFile], object]) -> None:
        """Call `tell` once the step that several processes save is published.

        Args:
            place: That they fill.
            directory: That is being saved in it.
            tell: Takes the path that it has then, and what says whether it still is what was saved.
        """
        item = self._item_in(place, directory)
        if item is not None:
            self._together.append(_JointStep(directory, os.path.join(self._step, item), tell))

    def written(self) -> None:
        """Keep the values of this joint save, which is about to get its final path."""
        for one in self._together:
            one.hold()

    def published(self) -> None:
        """Make the calls that were asked for: all processes have saved the step, and it is published."""
        for one in self._together:
            one.published()

        self.release()

    def release(self) -> None:
        """Hold on to nothing. Idempotent."""
        for one in self._together:
            one.release()

        self._together.clear()

    def complete(self) -> None:
        """Make the calls that were asked for: all is written, and the step is about to get its own path.

        Afterwards another save could have replaced it there.
        """
        self._hold()
        for built, path, tell in self._saved:
            tell(built, path)

        self._saved.clear()

    def _in_base(self, item: str | None) -> str | None:
        return None if item is None or self._base is None else os.path.join(self._base, item)

    def _item_in(self, place: str, directory: str) -> str | None:
        """Return the item that a directory in a place becomes; None if it is no item of the step."""
        parent, name = os.path.split(directory)
        is_of_step = os.path.dirname(place) == self._step + file_names.TEMPORARY_SUFFIX
        return name if parent == place and is_of_step else None

    def _item(self, directory: str) -> str | None:
        """Return the item that a directory becomes; None if it does not belong to the step."""
        parent, name = os.path.split(directory)
        return (
            name.removesuffix(file_names.TEMPORARY_SUFFIX)
            if parent.removesuffix(file_names.TEMPORARY_SUFFIX) == self._step
            else None
        )


_LINKS: Final[ContextVar[StepLinks | None]] = ContextVar("penstock.orbax.links", default=None)


def links_in_force() -> StepLinks | None:
    """Return the links of the manager that is saving right now; None if none is."""
    return _LINKS.get()
