"""How a manager is opened: its Checkpointer, and its root made ready to be written into."""

from __future__ import annotations

__all__ = ("Opening", "own_or_given", "prepare_root")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from structlog.stdlib import BoundLogger

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.errors import InUseError, SpecError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.deletion import remove_abandoned
from penstock.steps import step_directory as on_disk
from penstock.steps.step_names import NameFormat


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a root is opened."""

    owned: Checkpointer | None  #: entered and left with it
    metadata: Mapping[str, Any] | None  #: the caller's own, for a new root
    writes: bool  #: whether to create the root
    clean: bool  #: whether to remove what crashed saves left there
    sigterm: bool  #: whether a SIGTERM counts as a preemption


def own_or_given(given: Checkpointer | None, options: Mapping[str, Any]) -> Checkpointer:
    """Return the Checkpointer that was given, or a new one with the options.

    Raises:
        SpecError: If there is one and an option beside it.
    """
    if given is None:
        return Checkpointer(**options)

    unused = [name for name, value in options.items() if value is not None]
    if unused:
        raise SpecError(f"{', '.join(unused)}: an option of the checkpointer, which is given already")

    return given


def prepare_root(
    store: Store, root: str, names: NameFormat, events: BoundLogger, opening: Opening
) -> Sequence[str]:
    """Write the metadata of a root that is held, and remove what crashed saves left there. Blocking.

    Returns:
        What was listed in it. With 20,000 steps, listing is most of the work.
    """
    if opening.metadata is not None:
        on_disk.write_root_metadata(store, root, opening.metadata)

    listed = on_disk.list_root(store, root)
    if opening.clean:
        for name in on_disk.leftovers(listed, names):
            _clean_up(store, os.path.join(root, name), events)

    return listed


def _clean_up(store: Store, path: str, events: BoundLogger) -> None:
    try:
        remove_abandoned(store, path)
    except InUseError:
        return  # a live save holds the directory it builds in
    except StorageError as error:
        events.warning("step.left_behind", path=path, error=repr(error))
    else:
        events.info("step.cleaned_up", path=path)
