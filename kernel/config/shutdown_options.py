"""Options for how saves and restores end when they are cancelled or the process exits."""

from __future__ import annotations

__all__ = ("READ_S", "StoppingOptions")

from dataclasses import dataclass, field
from typing import Final, Literal, final

READ_S: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """`[stopping]`: how saves and restores end that are cancelled, or under way when the process ends.

    Attributes:
        at_exit: What happens to saves in an event loop of another thread (as with `penstock.sync`) when
            the main thread ends without leaving its Checkpointer: `"drain"` waits for them; `"abandon"`
            lets them die with the process, as if it had been killed.
        at_exit_s: How long `"drain"` waits, in seconds.
        sigterm_s: If above 0, a SIGTERM is held back until the saves under way have ended, for at most
            this many seconds. Then it acts as usual. A second one is not held back.
        undo_s: How many seconds a save that failed or was cancelled waits for third-party handlers that
            write in the background. After that it ends with an error that names the handler.
        read_s: How many seconds a restore that was cancelled, or whose deadline passed, waits for reads under
            way; so does whatever else only reads. After that it leaves them to their threads.
        delete_s: How many seconds leaving a CheckpointManager waits for the deletion of steps. After that it
            leaves them, too: the rest of a step that is gone already is removed by the next manager.
    """

    at_exit: Literal["drain", "abandon"] = "drain"
    at_exit_s: float = field(default=600.0, metadata={"positive": True})
    sigterm_s: float = 0.0
    undo_s: float = field(default=60.0, metadata={"positive": True})
    read_s: float = field(default=READ_S, metadata={"positive": True})
    delete_s: float = field(default=60.0, metadata={"positive": True})
