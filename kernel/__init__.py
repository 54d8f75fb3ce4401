"""The mechanism: messages, pipelines, the memory budget, registries and the protocols between parts.

Imports no array library and no other part of penstock, but anyio, structlog and the standard library. Authors
of stages, leaf handlers, layouts and stores import from here. Each name is fetched when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "LOGGER_NAME",
    "Actor",
    "Advice",
    "BufferHandler",
    "BuildToken",
    "ByteLease",
    "Change",
    "ChangesLeaves",
    "CheckedRead",
    "ChunkingHandler",
    "Codec",
    "CodecType",
    "Committed",
    "Concurrent",
    "Coordinator",
    "DataFile",
    "DirectRead",
    "Directories",
    "Document",
    "DriverRead",
    "Extents",
    "Finishing",
    "HandlerLookup",
    "Hold",
    "HostBatch",
    "HostPart",
    "KeyKind",
    "KeyPath",
    "Layout",
    "Leaf",
    "LeafBatch",
    "LeafHandler",
    "LeafSpec",
    "Located",
    "MemoryRegulator",
    "Messages",
    "Milestone",
    "ObjectStore",
    "OpaquePiece",
    "Opening",
    "Operation",
    "ParamInfo",
    "PartsHandler",
    "PassesOn",
    "Piece",
    "PiecePlan",
    "Pipeline",
    "Placement",
    "PlannedBatch",
    "Published",
    "Read",
    "ReadBatch",
    "ReadLeaf",
    "ReadLeaves",
    "ReadableFile",
    "Replicas",
    "RestorePlan",
    "RestoreRequest",
    "RestoreRun",
    "RestoredBatch",
    "RestoredTree",
    "RunLimits",
    "SavePlan",
    "SaveRun",
    "ScatterRead",
    "Scheme",
    "SharedFiles",
    "SingleProcessCoordinator",
    "Slot",
    "Span",
    "Stage",
    "StageStatistics",
    "StagedBatch",
    "Store",
    "StoreWrapper",
    "StoredCheckpoint",
    "StoredLeaf",
    "StoredRows",
    "SystemFiles",
    "Target",
    "Threads",
    "TileRead",
    "Transfers",
    "TreeToSave",
    "TypeHandler",
    "Waitable",
    "WholeChunks",
    "Written",
    "WrittenBatch",
    "bottleneck",
    "decoded",
    "get_logger",
    "run_pipeline",
)

if TYPE_CHECKING:
    from penstock.kernel.codecs import Codec, CodecType
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.events import LOGGER_NAME, get_logger
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.memory.regulator import MemoryRegulator
    from penstock.kernel.messages.restore import (
        Change,
        HostBatch,
        HostPart,
        Located,
        OpaquePiece,
        PlannedBatch,
        ReadBatch,
        RestoredBatch,
        RestoredTree,
        RestorePlan,
        RestoreRequest,
        decoded,
    )
    from penstock.kernel.messages.save import (
        Committed,
        Extents,
        LeafBatch,
        Piece,
        Published,
        SavePlan,
        StagedBatch,
        TreeToSave,
        WrittenBatch,
    )
    from penstock.kernel.pipeline.pipeline import Milestone, Pipeline, Slot
    from penstock.kernel.pipeline.run_context import RestoreRun, RunLimits, SaveRun
    from penstock.kernel.pipeline.runner import run_pipeline
    from penstock.kernel.pipeline.stage import (
        Actor,
        ChangesLeaves,
        Concurrent,
        Finishing,
        Messages,
        PassesOn,
        Stage,
    )
    from penstock.kernel.pipeline.statistics import Advice, Span, StageStatistics, bottleneck
    from penstock.kernel.protocols.coordinator import Coordinator, Operation, SingleProcessCoordinator
    from penstock.kernel.protocols.layouts import (
        Layout,
        Opening,
        StoredCheckpoint,
    )
    from penstock.kernel.protocols.leaf import (
        KeyKind,
        KeyPath,
        LeafSpec,
        ParamInfo,
        Replicas,
        StoredLeaf,
        StoredRows,
    )
    from penstock.kernel.protocols.leaf_handlers import (
        BufferHandler,
        ChunkingHandler,
        HandlerLookup,
        Leaf,
        LeafHandler,
        PartsHandler,
        ReadLeaf,
        ReadLeaves,
        TypeHandler,
        Waitable,
    )
    from penstock.kernel.protocols.reads import (
        CheckedRead,
        DirectRead,
        DriverRead,
        Read,
        ScatterRead,
        Target,
        TileRead,
        WholeChunks,
    )
    from penstock.kernel.protocols.stores import (
        BuildToken,
        DataFile,
        Directories,
        Hold,
        ObjectStore,
        Placement,
        ReadableFile,
        SharedFiles,
        Store,
        StoreWrapper,
        SystemFiles,
        Transfers,
    )
    from penstock.kernel.protocols.written import Document, PiecePlan, Written
    from penstock.kernel.registry import Scheme
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    # One name to a line would be longer than the rest of the file.
    # fmt: off
    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.kernel.codecs": ("Codec", "CodecType"),
            "penstock.kernel.concurrency.threads": ("Threads",),
            "penstock.kernel.events": ("LOGGER_NAME", "get_logger"),
            "penstock.kernel.memory.byte_account": ("ByteLease",),
            "penstock.kernel.memory.regulator": ("MemoryRegulator",),
            "penstock.kernel.messages.restore": (
                "OpaquePiece", "decoded", "HostBatch", "HostPart", "Located", "PlannedBatch", "ReadBatch",
                "RestorePlan", "RestoreRequest", "RestoredBatch", "RestoredTree", "Change",
            ),
            "penstock.kernel.messages.save": (
                "Committed", "Extents", "LeafBatch", "Piece", "Published", "SavePlan", "StagedBatch",
                "TreeToSave", "WrittenBatch",
            ),
            "penstock.kernel.pipeline.statistics": ("Advice", "Span", "StageStatistics", "bottleneck"),
            "penstock.kernel.pipeline.pipeline": ("Milestone", "Pipeline", "Slot"),
            "penstock.kernel.pipeline.run_context": ("RestoreRun", "RunLimits", "SaveRun"),
            "penstock.kernel.pipeline.runner": ("run_pipeline",),
            "penstock.kernel.pipeline.stage": (
                "Actor", "ChangesLeaves", "Concurrent", "Finishing", "Messages", "PassesOn", "Stage",
            ),
            "penstock.kernel.registry": ("Scheme",),
            "penstock.kernel.protocols.layouts": ("StoredCheckpoint", "Layout", "Opening"),
            "penstock.kernel.protocols.coordinator": ("Coordinator", "Operation", "SingleProcessCoordinator"),
            "penstock.kernel.protocols.leaf": (
                "KeyKind", "KeyPath", "LeafSpec", "ParamInfo", "Replicas", "StoredLeaf", "StoredRows",
            ),
            "penstock.kernel.protocols.leaf_handlers": (
                "BufferHandler", "ChunkingHandler", "HandlerLookup", "Leaf", "LeafHandler", "PartsHandler",
                "ReadLeaf", "ReadLeaves", "TypeHandler", "Waitable",
            ),
            "penstock.kernel.protocols.reads": (
                "CheckedRead", "DirectRead", "DriverRead", "Read", "ScatterRead", "Target", "TileRead",
                "WholeChunks",
            ),
            "penstock.kernel.protocols.stores": (
                "BuildToken", "DataFile", "Directories", "Hold", "ObjectStore", "Placement", "ReadableFile",
                "SharedFiles", "Store", "StoreWrapper", "SystemFiles", "Transfers",
            ),
            "penstock.kernel.protocols.written": ("Document", "PiecePlan", "Written"),
        },
    )
    # fmt: on
