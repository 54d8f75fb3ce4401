"""The errors about steps."""

from __future__ import annotations

__all__ = ("StepAlreadyExistsError", "StepNotFoundError")

from typing import final

from penstock.errors import CorruptCheckpointError, StepExistsError

StepAlreadyExistsError = StepExistsError


@final
class StepNotFoundError(CorruptCheckpointError, FileNotFoundError):
    """There is no such step, or no step at all. It is a FileNotFoundError.

    Attributes:
        step: Its number; None if the latest was asked for.
    """

    def __init__(self, path: str, step: int | None) -> None:
        super().__init__(path, "there is no step in it" if step is None else f"there is no step {step} in it")
        self.step = step
