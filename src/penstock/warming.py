"""Loading the rest of penstock in a worker thread: before the first save or restore, or with it.

`import penstock` loads what is called first and nothing that imports jax. What saves and restores is loaded
when a `Checkpointer` or a `CheckpointManager` is entered, or all at once by `warm_up`.
"""

from __future__ import annotations

__all__ = ("warm_up",)

import sys
from importlib import import_module

from penstock.checkpointer.checkpointer import NEEDED_TO_OPERATE
from penstock.config.config import Config
from penstock.event_loop.imports import import_beside_the_loop
from penstock.steps.manager import NEEDED_TO_MANAGE


async def warm_up() -> None:
    """Load everything that a first call would load, so that no later call imports anything.

    ```python
    async def main():
        await penstock.warm_up()   # while the server starts
    ```

    Entering a `Checkpointer` does the part that it needs, so this only moves that time to where it does
    not matter: 0.3 to 0.9 s in a process that has imported jax. `penstock.orbax` is loaded, too, where it was
    imported. The event loop runs meanwhile; it stops for at most some milliseconds, unless jax or
    another native library is imported for the first time: see docs/howto/serve-without-a-stall.md.
    TensorStore is loaded by the first checkpoint that needs it, also in a worker thread.

    Cancellation:
        Delivered once the imports are done.
    """
    await import_beside_the_loop(_import_everything, Config.load(None).loop)


def _import_everything() -> None:
    for home in (*NEEDED_TO_OPERATE, *NEEDED_TO_MANAGE):
        import_module(home)
    for face in ("penstock", "penstock.orbax", "penstock.orbax.v1"):
        module = sys.modules.get(face)
        for name in () if module is None else module.__all__:
            getattr(module, name)  # imports its home
