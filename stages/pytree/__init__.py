"""From pytrees to leaves: `flattening` names the leaves of a tree, and records the classes of tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "StructureCache",
    "flatten_tree",
)

if TYPE_CHECKING:
    from penstock.stages.pytree.flattening import StructureCache, flatten_tree
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.stages.pytree.flattening": (
                "StructureCache",
                "flatten_tree",
            ),
        },
    )
