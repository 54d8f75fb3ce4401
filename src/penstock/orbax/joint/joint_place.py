"""The directory that the processes of a job fill together, as handlers that are called for it know it."""

from __future__ import annotations

__all__ = ("joint_build_around", "joint_place", "writes_what_is_whole")

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from penstock.orbax.common.handler_paths import path_text

if TYPE_CHECKING:  # one process needs nothing of it
    from penstock.orbax.joint.joint_build import JointBuild


@contextmanager
def joint_place(build: JointBuild) -> Generator[None]:
    """Make it known to handlers that are called inside that all processes call them, for files of a build.

    By a context variable, and not by what they are given: a user's handler calls those of trees with paths
    that it makes.
    """
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
    """Whether this process writes into a directory what every process has whole: of several, the primary."""
    build = joint_build_around(directory)
    return build is None or build.is_primary


_IN_FORCE: Final[ContextVar[JointBuild | None]] = ContextVar("penstock.orbax.joint_build", default=None)
