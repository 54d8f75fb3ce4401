"""safetensors behind the kernel's `Layout` protocol: one file, or a folder of files and their index."""

from __future__ import annotations

__all__ = ("SafetensorsLayout",)

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from penstock.handlers.formats.orbax.file_names import (
    COMMIT_MARK,
    TEMPORARY_SUFFIX,
    temporary_path,
    unfinished_at,
)
from penstock.handlers.formats.safetensors.file_set import bytes_to_decode
from penstock.handlers.formats.safetensors.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    open_checkpoint,
)
from penstock.handlers.formats.safetensors.tensor_offsets import (
    DEFAULT_SHARD_BYTES,
    SINGLE_FILE,
    arrange,
    check_leaf,
)
from penstock.handlers.formats.safetensors.tensor_paths import INDEX_SUFFIX, SUFFIX, holds_tensors
from penstock.handlers.formats.safetensors.written_digests import WrittenDigests
from penstock.kernel.errors import ConfigError, NotACheckpointError, PathError
from penstock.kernel.protocols.layouts import Arrangement, Opening
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document


@final
@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """Writes files that every safetensors reader reads, and reads any whose names form a tree.

    A path that ends in `.safetensors` is one file. Any other is a folder, which holds
    `model.safetensors`, or several files with `model.safetensors.index.json`.

    What tensors cannot express (strings, None, empty containers, lists, PRNG keys) is stored in
    `__metadata__`, which other readers ignore. Shardings are not stored.

    Args:
        max_shard_bytes: A file in a folder that would hold more data is followed by another one; by
            default 5 GB. A single file is never split.
    """

    max_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_shard_bytes is not None and self.max_shard_bytes <= 0:
            raise ConfigError("max_shard_bytes", f"must be positive, not {self.max_shard_bytes}")

    def temporary_name(self, path: str) -> str:
        """The name of the folder in which the file or folder `path` is made.

        Raises:
            PathError: If `path` is named like an interrupted save, or is one file that would have to be
                split.
        """
        if self.max_shard_bytes is not None and path.endswith(SUFFIX):
            raise PathError(path, "is one file, which max_shard_bytes cannot split; name a folder")

        return temporary_path(path)

    def data_file(self) -> str:
        return SINGLE_FILE

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Check each leaf; see `check_leaf` for the errors. Names were compared before."""
        for leaf in leaves:
            check_leaf(leaf.info, leaf.spec)

    def documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """None: the headers and the index, made by `arrange`, say everything.

        Digests of leaves are not kept, so such a checkpoint cannot be the base of another one.
        """
        return ()

    def arrange(
        self,
        path: str,
        infos: Sequence[ParamInfo],
        specs: Sequence[LeafSpec],
        custom_metadata: Mapping[str, Any] | None,
    ) -> Arrangement:
        """Decide where each leaf goes; see `tensor_offsets.arrange` for what it raises."""
        most = None if path.endswith(SUFFIX) else self.max_shard_bytes or DEFAULT_SHARD_BYTES
        return arrange(infos, specs, custom_metadata, most)

    def digests(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> WrittenDigests:
        """Collect the checksums that the heads have of the tensors."""
        return WrittenDigests(arrangement, specs)

    def file_of(self, path: str) -> str | None:
        """The file that alone becomes `path`; None if it is a folder."""
        return SINGLE_FILE if path.endswith(SUFFIX) else None

    def recognises(self, store: Store, path: str) -> bool:
        """True if `path` holds only safetensors; overwriting a folder would lose anything else in it."""
        if store.kind(path) == "file":
            return path.endswith(SUFFIX)

        names = set(store.list_directory(path)) - {COMMIT_MARK}
        return all(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Tell what the headers at `path` take."""
        nbytes = bytes_to_decode(store, path) if holds_tensors(store, path) else 0
        return Opening(nbytes, partial(self.open, store, path, item))

    def open(self, store: Store, path: str, item: str | None = None) -> SafetensorsCheckpoint:
        """Read the headers of a checkpoint; see `open_checkpoint` for what it raises."""
        if TEMPORARY_SUFFIX in os.path.basename(path):
            raise unfinished_at(store, path, path)
        if store.kind(path) is None:
            raise NotACheckpointError(path, "does not exist")
        if not holds_tensors(store, path):
            raise NotACheckpointError(
                path, f"is not a safetensors file ({SUFFIX}), nor a folder with one in it"
            )

        return open_checkpoint(store, path, item)
