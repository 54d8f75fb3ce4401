"""Checkpoints for JAX, made for asyncio.

A save or a restore is a pipeline of small actors under one memory budget::

    async with penstock.Checkpointer() as ckpt:
        save = await ckpt.save("run/100", state)
        ...  # training goes on
        report = await save
        state = await ckpt.restore("run/100", like=state)

Scripts without an event loop find the same in `penstock.sync`. Importing this module loads neither
jax nor tensorstore: what saves and restores is loaded in a worker thread when a `Checkpointer` is first
entered, or by `warm_up`, and any other name when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "CheckpointManager",
    "CheckpointMetadata",
    "Checkpointer",
    "Composite",
    "Config",
    "GcReport",
    "HandlerRegistry",
    "JobOptions",
    "LeafMetadata",
    "LeafStream",
    "MemoryRegulator",
    "Milestone",
    "PenstockError",
    "PerProcess",
    "Pipeline",
    "Progress",
    "RegulatorStatistics",
    "RepairReport",
    "RestoreReport",
    "SaveArgs",
    "SaveFormat",
    "SaveFuture",
    "SaveReport",
    "SealReport",
    "Transform",
    "VerifyReport",
    "__version__",
    "convert",
    "delete",
    "errors",
    "export_safetensors",
    "gc",
    "items",
    "metadata",
    "pipelines",
    "repair",
    "restore",
    "restore_items",
    "rules",
    "save",
    "seal",
    "steps",
    "sync",
    "verify",
    "warm_up",
    "watch",
)

__version__ = "0.1.0"


if TYPE_CHECKING:
    from penstock import errors, items, pipelines, rules, steps, sync
    from penstock.api import metadata, restore, restore_items, save, verify, warm_up
    from penstock.checkpointer.checkpointer import Checkpointer
    from penstock.checkpointer.description import CheckpointMetadata, LeafMetadata
    from penstock.checkpointer.restores import LeafStream
    from penstock.checkpointer.save_future import SaveFuture
    from penstock.config.config import Config
    from penstock.handlers.coordinators.job_options import JobOptions
    from penstock.handlers.layouts.item_types import Composite
    from penstock.handlers.leaves.handler_registry import HandlerRegistry
    from penstock.kernel.errors import PenstockError
    from penstock.kernel.memory.regulator import MemoryRegulator, RegulatorStatistics
    from penstock.kernel.messages.restore import Transform
    from penstock.kernel.pipeline.pipeline import Milestone, Pipeline
    from penstock.kernel.pipeline.run_context import Progress
    from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
    from penstock.reports.report import RestoreReport, SaveReport
    from penstock.stages.pytree.flattening import PerProcess
    from penstock.steps.manager import CheckpointManager
    from penstock.steps.step_watch import watch
    from penstock.tools.convert import convert
    from penstock.tools.delete import delete
    from penstock.tools.export import export_safetensors
    from penstock.tools.gc import GcReport, gc
    from penstock.tools.repair import repair
    from penstock.tools.repair_report import RepairReport
    from penstock.tools.seal import SealReport, seal
    from penstock.verification.verify import VerifyReport
else:
    import sys as _sys

    from penstock.unsupported import refuse_free_threading as _refuse_free_threading
    from penstock.unsupported import refuse_windows as _refuse_windows

    _refuse_windows(_sys.platform)
    _refuse_free_threading(getattr(_sys, "_is_gil_enabled", None))

    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock": ("errors", "items", "pipelines", "rules", "steps", "sync"),
            "penstock.api": ("metadata", "restore", "restore_items", "save", "verify", "warm_up"),
            "penstock.checkpointer.checkpointer": ("Checkpointer",),
            "penstock.checkpointer.description": ("CheckpointMetadata", "LeafMetadata"),
            "penstock.checkpointer.restores": ("LeafStream",),
            "penstock.verification.verify": ("VerifyReport",),
            "penstock.handlers.layouts.item_types": ("Composite",),
            "penstock.config.config": ("Config",),
            "penstock.handlers.coordinators.job_options": ("JobOptions",),
            "penstock.kernel.protocols.save_format": ("SaveArgs", "SaveFormat"),
            "penstock.kernel.errors": ("PenstockError",),
            "penstock.kernel.memory.regulator": ("MemoryRegulator", "RegulatorStatistics"),
            "penstock.kernel.messages.restore": ("Transform",),
            "penstock.checkpointer.save_future": ("SaveFuture",),
            "penstock.kernel.pipeline.pipeline": ("Milestone", "Pipeline"),
            "penstock.kernel.pipeline.run_context": ("Progress",),
            "penstock.reports.report": ("RestoreReport", "SaveReport"),
            "penstock.handlers.leaves.handler_registry": ("HandlerRegistry",),
            "penstock.stages.pytree.flattening": ("PerProcess",),
            "penstock.steps.manager": ("CheckpointManager",),
            "penstock.steps.step_watch": ("watch",),
            "penstock.tools.convert": ("convert",),
            "penstock.tools.delete": ("delete",),
            "penstock.tools.gc": ("GcReport", "gc"),
            "penstock.tools.export": ("export_safetensors",),
            "penstock.tools.repair": ("repair",),
            "penstock.tools.repair_report": ("RepairReport",),
            "penstock.tools.seal": ("SealReport", "seal"),
        },
    )

    from penstock.own_program import runs_the_command as _runs_the_command

    if not _runs_the_command(_sys.argv, _sys.orig_argv):
        # A program calls these first in its event loop, where nothing should be imported. The command
        # should answer soon, and most of its subcommands need none of them.
        import penstock.api
        import penstock.items
        import penstock.steps.step_watch  # noqa: F401
