"""Pipelines: the value, what runs it, and what a stage may use while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "FunctionStage",
    "RunCaches",
    "Staging",
    "advice_of",
    "release_dropped",
    "workers_of",
)

if TYPE_CHECKING:
    from penstock.kernel.pipeline.run_context import RunCaches, Staging
    from penstock.kernel.pipeline.runner import release_dropped
    from penstock.kernel.pipeline.stage import FunctionStage, workers_of
    from penstock.kernel.pipeline.statistics import advice_of
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.kernel.pipeline.run_context": (
                "RunCaches",
                "Staging",
            ),
            "penstock.kernel.pipeline.runner": ("release_dropped",),
            "penstock.kernel.pipeline.stage": ("FunctionStage", "workers_of"),
            "penstock.kernel.pipeline.statistics": ("advice_of",),
        },
    )
