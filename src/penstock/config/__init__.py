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
)

from penstock.config.config import (
    Config,
    FlowOptions,
    MemoryOptions,
    StoppingOptions,
    StoreOptions,
    TelemetryOptions,
)
from penstock.event_loop.interpreter_settings import LoopOptions
from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
