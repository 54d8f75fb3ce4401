"""Options about the end of things: of saves that are cancelled, and of the process."""

from __future__ import annotations

__all__ = ("StoppingOptions",)

from dataclasses import dataclass, field
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """`[stopping]`: what becomes of saves when they are given up, and when the process is to end.

    Attributes:
        at_exit: What becomes of the saves of an event loop in another thread (so of `penstock.sync`)
            when the main thread ends without leaving its Checkpointer: `"drain"` waits for them;
            `"abandon"` lets them die with the process, as if it had been killed.
        at_exit_s: How long `"drain"` waits, in seconds.
        sigterm_s: If above 0, a SIGTERM is held back until the saves that are under way are over, for
            at most so many seconds. Then it does what it would have done. A second one is not held back.
        undo_s: How long a save that failed or was cancelled waits for what third-party handlers write
            in the background, in seconds. After that it ends with an error that names the handler.
    """

    at_exit: Literal["drain", "abandon"] = "drain"
    at_exit_s: float = field(default=600.0, metadata={"positive": True})
    sigterm_s: float = 0.0
    undo_s: float = field(default=60.0, metadata={"positive": True})
