"""The default layout of a Checkpointer: opens any format that penstock reads, and says which one is saved."""

from __future__ import annotations

__all__ = ("AutoLayout",)

from dataclasses import dataclass, field
from functools import partial
from typing import final

from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.layouts import FoundItems, Layout, ListedItems, Opening, StoredCheckpoint
from penstock.kernel.protocols.stores import Store


@final
@dataclass(frozen=True, slots=True)
class AutoLayout:
    """Opens a checkpoint of any format that penstock reads. A Checkpointer with it saves with one layout.

    Args:
        written: Writes all checkpoints, and opens those that no other format recognises.
    """

    written: Layout = field(default_factory=OrbaxLayout)

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of a checkpoint; safetensors have none.

        Raises:
            UnsupportedFormatError: If there are none.
        """
        if isinstance(self.written, ListedItems) and not is_safetensors(store, path):
            return self.written.items(store, path)

        raise UnsupportedFormatError(path, "has no items; restore it as a whole")

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Find what `open` opens, and tell what its documents take."""
        if not is_safetensors(store, path):
            return self.written.find(store, path, item)

        # Here, because most checkpoints are not.
        from penstock.handlers.formats.safetensors.file_set import bytes_to_decode
        from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint

        return Opening(bytes_to_decode(store, path), partial(open_checkpoint, store, path, item))

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        """Find the checkpoint at `path`, or an item of it, and read its documents.

        Raises:
            PenstockError: Whatever the layout that recognises it raises.
        """
        return self.find(store, path, item).open()
