"""Says what may be deleted: a checkpoint, and nothing that would be lost with it."""

from __future__ import annotations

__all__ = ("check_deletable",)

from typing import Literal

from penstock.handlers.formats.orbax.discovery import is_checkpoint
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.stores import Store


def check_deletable(store: Store, path: str) -> Literal["file", "directory"]:
    """Return what the checkpoint at `path` is. Blocking.

    Raises:
        NotACheckpointError: If there is nothing, or no checkpoint.
    """
    kind = store.kind(path)
    if kind is None:
        raise NotACheckpointError(path, "does not exist")
    if kind == "directory" and is_checkpoint(store, path):
        return kind
    if not is_safetensors(store, path) or not SafetensorsLayout().recognises(store, path):
        raise NotACheckpointError(path, f"is a {kind} but not a checkpoint; only checkpoints are deleted")

    return kind
