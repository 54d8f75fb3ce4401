"""The configuration: every option with its default, and the layers that set it."""

from __future__ import annotations

__all__ = (
    "Config",
    "FlowOptions",
    "JobLimits",
    "JobOptions",
    "LoopOptions",
    "MemoryOptions",
    "SaveArgs",
    "SaveFormat",
    "StoppingOptions",
    "StoreOptions",
    "TelemetryOptions",
    "TierOptions",
)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.config import (
        Config,
        FlowOptions,
        MemoryOptions,
        StoppingOptions,
        StoreOptions,
        TelemetryOptions,
        TierOptions,
    )
    from penstock.event_loop.interpreter_settings import LoopOptions
    from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
    from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.config.config": (
                "Config",
                "FlowOptions",
                "MemoryOptions",
                "StoppingOptions",
                "StoreOptions",
                "TelemetryOptions",
                "TierOptions",
            ),
            "penstock.event_loop.interpreter_settings": ("LoopOptions",),
            "penstock.handlers.coordinators.job_options": ("JobLimits", "JobOptions"),
            "penstock.kernel.protocols.save_format": ("SaveArgs", "SaveFormat"),
        },
    )
