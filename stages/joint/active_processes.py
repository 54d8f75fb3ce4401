"""Checks that all processes that hold parts of an array take part in its save."""

from __future__ import annotations

__all__ = ("check_active",)

from collections.abc import Sequence

from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.protocols.leaf_handlers import GlobalHandler


def check_active(leaves: Leaves, active: Sequence[int]) -> None:
    """Refuse an array that has shards on processes that take no part: nobody would write them.

    Args:
        leaves: With their values.
        active: The processes that take part.

    Raises:
        InvalidLeafError: For the first such leaf.
    """
    assert leaves.values is not None
    for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
        if not spec.is_global or not isinstance(handler, GlobalHandler):
            continue

        others = [index for index in handler.processes_of(leaves.values[number]) if index not in active]
        if others:
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                f"the array has shards on process {', '.join(map(str, sorted(others)))}, "
                f"and only {', '.join(map(str, active))} take part (job.active_processes)",
            )
