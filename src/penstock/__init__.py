"""Checkpoints for JAX, made for asyncio.

A save or a restore is a pipeline of small actors under one memory budget::

    async with penstock.Checkpointer() as ckpt:
        save = await ckpt.save("run/step_100", state)
        ...  # training goes on
        report = await save
        state = await ckpt.restore("run/step_100", like=state)

Scripts without an event loop find the same in `penstock.sync`. Importing this module loads neither
jax nor tensorstore: each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "CheckpointManager",
    "Checkpointer",
    "Composite",
    "Config",
    "HandlerRegistry",
    "MemoryRegulator",
    "PenstockError",
    "Pipeline",
    "RestoreReport",
    "SaveArgs",
    "SaveFormat",
    "SaveFuture",
    "Transform",
    "__version__",
    "convert",
    "export_safetensors",
    "metadata",
    "restore",
    "restore_items",
    "save",
    "steps",
    "sync",
    "verify",
    "watch",
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock import steps, sync
    from penstock.api import metadata, restore, restore_items, save, verify
    from penstock.checkpointer.checkpointer import Checkpointer
    from penstock.handlers.formats.items.item_types import Composite
    from penstock.kernel.config.config import Config
    from penstock.kernel.config.save_format import SaveArgs, SaveFormat
    from penstock.kernel.errors import PenstockError
    from penstock.kernel.memory.regulator import MemoryRegulator
    from penstock.kernel.messages.restore_options import RestoreReport, Transform
    from penstock.kernel.pipeline.futures import SaveFuture
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.plugins.handler_registry import HandlerRegistry
    from penstock.steps.manager import CheckpointManager
    from penstock.steps.step_watch import watch
    from penstock.tools.convert import convert, export_safetensors
else:
    # In the `else`, because a checker that saw `__getattr__` would accept `penstock.typo`.
    from importlib import import_module as _import_module

    _MODULE_OF = {
        "CheckpointManager": "penstock.steps.manager",
        "Checkpointer": "penstock.checkpointer.checkpointer",
        "Composite": "penstock.handlers.formats.items.item_types",
        "Config": "penstock.kernel.config.config",
        "HandlerRegistry": "penstock.kernel.plugins.handler_registry",
        "MemoryRegulator": "penstock.kernel.memory.regulator",
        "PenstockError": "penstock.kernel.errors",
        "Pipeline": "penstock.kernel.pipeline.pipeline",
        "RestoreReport": "penstock.kernel.messages.restore_options",
        "SaveArgs": "penstock.kernel.config.save_format",
        "SaveFormat": "penstock.kernel.config.save_format",
        "SaveFuture": "penstock.kernel.pipeline.futures",
        "Transform": "penstock.kernel.messages.restore_options",
        "convert": "penstock.tools.convert",
        "export_safetensors": "penstock.tools.convert",
        "metadata": "penstock.api",
        "restore": "penstock.api",
        "restore_items": "penstock.api",
        "save": "penstock.api",
        "steps": "penstock.steps",
        "sync": "penstock.sync",
        "verify": "penstock.api",
        "watch": "penstock.steps.step_watch",
    }

    def __getattr__(name: str) -> object:
        try:
            home = _MODULE_OF[name]
        except KeyError:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=_import_module(__name__)) from None
        module = _import_module(home)
        value = module if home == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF})
