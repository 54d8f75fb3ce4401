"""Building, publishing, reading and deleting a checkpoint, the same in every store."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "WRITER",
    "ProcessIdentity",
    "StoreClaimFiles",
    "ThisProcess",
    "Workspace",
    "WriterHold",
    "delete_checkpoint",
    "read_pins",
    "temporary_path",
)

if TYPE_CHECKING:
    from penstock.handlers.stores.publishing.claims import StoreClaimFiles
    from penstock.handlers.stores.publishing.deletion import delete_checkpoint
    from penstock.handlers.stores.publishing.paths import temporary_path
    from penstock.handlers.stores.publishing.pinned_steps import read_pins
    from penstock.handlers.stores.publishing.process_identity import ProcessIdentity, ThisProcess
    from penstock.handlers.stores.publishing.workspace import Workspace
    from penstock.handlers.stores.publishing.writer_hold import WRITER, WriterHold
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.stores.publishing.claims": ("StoreClaimFiles",),
            "penstock.handlers.stores.publishing.deletion": ("delete_checkpoint",),
            "penstock.handlers.stores.publishing.paths": ("temporary_path",),
            "penstock.handlers.stores.publishing.pinned_steps": ("read_pins",),
            "penstock.handlers.stores.publishing.process_identity": (
                "ProcessIdentity",
                "ThisProcess",
            ),
            "penstock.handlers.stores.publishing.workspace": ("Workspace",),
            "penstock.handlers.stores.publishing.writer_hold": (
                "WRITER",
                "WriterHold",
            ),
        },
    )
