"""The interfaces between the parts of penstock: leaves, handlers, layouts, stores, coordinators."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "DEFAULT_PLACEMENT",
    "DISK_MARK",
    "SMALL_DOCUMENT",
    "ArrangedLayout",
    "Arrangement",
    "ChecksummedCheckpoint",
    "Destination",
    "FilePosition",
    "KeyValues",
    "NamedTensors",
    "NoHold",
    "PartOf",
    "RequestFigures",
    "RunningSums",
    "SharedRead",
    "WholeWrites",
    "WrittenRange",
    "WrittenTable",
    "keys_of",
    "names_of",
    "runs_of",
)

if TYPE_CHECKING:
    from penstock.kernel.protocols.coordinator import KeyValues
    from penstock.kernel.protocols.layouts import (
        SMALL_DOCUMENT,
        ArrangedLayout,
        Arrangement,
        ChecksummedCheckpoint,
        FilePosition,
        NamedTensors,
        WrittenRange,
    )
    from penstock.kernel.protocols.leaf import keys_of, names_of, runs_of
    from penstock.kernel.protocols.leaf_handlers import PartOf
    from penstock.kernel.protocols.reads import Destination, SharedRead
    from penstock.kernel.protocols.stores import DEFAULT_PLACEMENT, NoHold, RequestFigures, WholeWrites
    from penstock.kernel.protocols.written import DISK_MARK, RunningSums, WrittenTable
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.kernel.protocols.layouts": (
                "ChecksummedCheckpoint",
                "NamedTensors",
                "SMALL_DOCUMENT",
                "ArrangedLayout",
                "Arrangement",
                "FilePosition",
                "WrittenRange",
            ),
            "penstock.kernel.protocols.coordinator": ("KeyValues",),
            "penstock.kernel.protocols.leaf": ("keys_of", "names_of", "runs_of"),
            "penstock.kernel.protocols.leaf_handlers": ("PartOf",),
            "penstock.kernel.protocols.reads": ("Destination", "SharedRead"),
            "penstock.kernel.protocols.stores": (
                "DEFAULT_PLACEMENT",
                "NoHold",
                "RequestFigures",
                "WholeWrites",
            ),
            "penstock.kernel.protocols.written": ("DISK_MARK", "RunningSums", "WrittenTable"),
        },
    )
