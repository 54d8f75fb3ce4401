"""Everything a Checkpointer is made of, and what one save or restore gets of it."""

from __future__ import annotations

__all__ = ("Compare", "Engine", "SaveKeywords")

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, TypeVar, cast, final

from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import PenstockError, SpecError, StorageError
from penstock.kernel.pipeline.run_context import RestoreRun, RunLimits, SaveRun
from penstock.kernel.pipeline.shared_objects import Shared
from penstock.kernel.protocols.layouts import ArrangedLayout, ItemsLayout
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.storage.holds import hold_for_reading
from penstock.kernel.storage.paths import absolute_path
from penstock.kernel.storage.workspace import Workspace

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.config.config import Config, FlowOptions
    from penstock.kernel.memory.regulator import MemoryRegulator
    from penstock.kernel.plugins.handler_registry import HandlerRegistry
    from penstock.kernel.protocols.coordinator import Coordinator
    from penstock.kernel.protocols.layouts import Layout
    from penstock.kernel.protocols.stores import Store

T = TypeVar("T")
Compare: TypeAlias = Literal["identity", "digest"]
"""How an unchanged leaf is known."""


class SaveKeywords(TypedDict, total=False):
    """Keyword arguments of `save` about how leaves are stored, and which need not be.

    Attributes:
        save_args: How leaves are stored, where not as the format says: a `SaveArgs` for all; a tree of
            them, each for every leaf at or below its place; or a function from the tuple of a leaf's
            stored keys to one or None.
        base: An earlier checkpoint. Leaves that are as they are there are linked and not written; each
            checkpoint is whole by itself, whichever is deleted first. What has a codec is written anew.
        compare: How that is known. `"identity"`: a leaf is the very jax.Array that this Checkpointer
            saved there. `"digest"`: its bytes have the SHA-256 that a save with it recorded there.
    """

    save_args: SaveArgs | Callable[[KeyPath], SaveArgs | None] | object
    base: str | os.PathLike[str] | None
    compare: Compare


LEAST_PIECE: Final = 2**20
MOST_PIECES: Final = 256
"""Pieces of one message: cutting so many takes the event loop about a millisecond."""

MOST_READS: Final = 10
"""Times that a checkpoint is read which is being overwritten all the while."""


@final
@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that all saves and restores of one Checkpointer share."""

    config: Config
    memory: MemoryRegulator
    registry: HandlerRegistry
    store: Store
    layout: Layout
    coordinator: Coordinator
    events: BoundLogger
    shared: Shared = field(default_factory=Shared)

    def save_run(
        self,
        path: str,
        threads: Threads,
        *,
        overwrite: bool,
        custom_metadata: Mapping[str, Any] | None,
        keywords: SaveKeywords,
    ) -> SaveRun:
        """Make what the stages of one save use.

        Raises:
            SpecError: If `custom_metadata` cannot be written as JSON, or `compare` is no such way.
        """
        unknown = next((name for name in keywords if name not in SaveKeywords.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"save() got an unexpected keyword argument {unknown!r}")

        base, compare = keywords.get("base"), keywords.get("compare", "identity")
        if compare not in ("identity", "digest"):
            raise SpecError(f"compare must be 'identity' or 'digest', not {compare!r}")

        workspace = Workspace(
            self.store,
            threads,
            path,
            self.layout.temporary_name(path),
            overwrite=overwrite,
            recognises=partial(self.layout.recognises, self.store),
            file=self.layout.file_of(path) if isinstance(self.layout, ArrangedLayout) else None,
        )
        return SaveRun(
            **self._shared(path, threads, self.config.save, self.memory.limit_of("save")),
            workspace=workspace,
            base=None if base is None else absolute_path(base),
            folder=(self.layout.only_folder or "") if isinstance(self.layout, ItemsLayout) else "",
            save_args=keywords.get("save_args"),
            by_digest=compare == "digest",
            started_ns=time.time_ns(),
            custom_metadata=_as_json(custom_metadata),
        )

    def restore_run(self, path: str, threads: Threads) -> RestoreRun:
        """Make what the stages of one restore use."""
        return RestoreRun(**self._shared(path, threads, self.config.restore, self.memory.limit))

    async def read_unchanged(self, path: str, threads: Threads, read: Callable[[], Awaitable[T]]) -> T:
        """Read again what was replaced meanwhile: parts of two checkpoints do not make one.

        As long as it reads, nobody on this machine who deletes steps deletes what lies at `path`.

        Raises:
            StorageError: If that happens too often.
        """
        async with hold_for_reading(self.store, threads, path):
            return await self._read_unchanged(path, threads, read)

    async def _read_unchanged(self, path: str, threads: Threads, read: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MOST_READS):
            before = await threads.run(self.store.identity, path)
            try:
                found = await read()
            except PenstockError:
                if before == await threads.run(self.store.identity, path):
                    raise
            else:
                if before == await threads.run(self.store.identity, path):
                    return found

                del found  # before its like is read again

            self.events.warning("restore.overtaken", path=path)

        raise StorageError("read", path, f"was replaced {MOST_READS} times while it was being read")

    def _shared(self, path: str, threads: Threads, options: FlowOptions, limit: int) -> dict[str, Any]:
        # Of a small budget several pieces are under way at once, and what the allocator keeps of each is
        # little. Below 1 MiB a piece costs more than its bytes.
        piece_bytes = min(options.piece_bytes, max(limit // 16, LEAST_PIECE), limit)
        return {
            "path": path,
            "registry": self.registry,
            "memory": self.memory,
            "threads": threads,
            "store": self.store,
            "layout": self.layout,
            "coordinator": self.coordinator,
            "events": self.events,
            "shared": self.shared,
            "limits": RunLimits(
                piece_bytes, options.batch_leaves, min(options.batch_bytes, MOST_PIECES * piece_bytes)
            ),
        }


def _as_json(custom_metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a reader will get: a copy, so that the caller may change the original."""
    if custom_metadata is None:
        return None
    if not isinstance(cast("object", custom_metadata), Mapping):
        raise SpecError(f"custom_metadata must be a mapping, not {custom_metadata!r}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(custom_metadata)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"custom_metadata cannot be written as JSON: {error}") from error

    return copied
