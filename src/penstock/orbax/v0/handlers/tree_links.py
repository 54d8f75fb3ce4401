"""Links from a tree to the step before, and from the next step to it, if a manager saves them."""

from __future__ import annotations

__all__ = ("joint_links", "own_links")

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.blocking.loop_thread import LoopThread
from penstock.kernel.storage.optional_base import BaseIfWhole
from penstock.orbax.v0.common.joint_directory import JointDirectory
from penstock.orbax.v0.common.unchanged_links import links_in_force
from penstock.orbax.v0.handlers.pytree_calls import Resources, Within
from penstock.stages.reuse.value_cache import KnownValues


def own_links(path: str, loop: LoopThread[Resources]) -> Mapping[str, Any]:
    """Return the keywords of a save that link unchanged leaves to the step before, if a manager saves.

    Args:
        path: The item of the step, as it is being built.
        loop: Of the handler that saves; once the step is complete it notes where the values lie.
    """
    links = links_in_force()
    if links is None:
        return {}

    links.when_complete(path, partial(loop.call, _note_moved, path))
    return {"base": links.base_of(path)}


def joint_links(place: Within | JointDirectory, loop: LoopThread[Resources]) -> Mapping[str, Any]:
    """Return the same for a save of several processes.

    Args:
        place: The item of the step; nothing is linked if it is a whole checkpoint.
        loop: Of the handler that saves; once the step is published it notes where the values lie.
    """
    links = links_in_force()
    if links is None or isinstance(place, JointDirectory):
        return {}

    links.when_published(place.build.place, place.path, partial(loop.call, _note_published, place.path))
    base = links.base_of_place(place.build.place, place.path)
    return {} if base is None else {"base": BaseIfWhole(base)}


async def _note_moved(resources: Resources, path: str, built: str, to: str) -> None:
    """Note that a checkpoint whose values are known lies at `built`, and is about to be moved to `to`."""
    engine = resources.save.engine
    engine.shared.of(KnownValues).moved(path, to, engine.store.identity(built))


async def _note_published(resources: Resources, built: str, path: str, is_same: Callable[[], bool]) -> None:
    """Note that what was saved at `built` lies at `path`, if it does: anybody may have replaced it."""
    if resources.within is None:
        return

    engine = resources.within.engine
    identity = engine.store.identity(path)
    if is_same():  # asked last
        engine.shared.of(KnownValues).moved(built, path, identity)
