"""Loading the rest of penstock in a worker thread: before the first save or restore, or with it.

`import penstock` loads what is called first and nothing that imports jax. What saves and restores is loaded
when a `Checkpointer` or a `CheckpointManager` is entered, or all at once by `warm_up`.
"""

from __future__ import annotations

__all__ = ("load_operations", "load_steps", "load_watching", "warm_up")

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Final

from penstock.kernel.concurrency.loading import import_beside_the_loop
from penstock.kernel.config.config import Config

if TYPE_CHECKING:
    from penstock.kernel.config.config import LoopOptions

# Modules, each with a name that it defines after its imports.
_OPERATIONS: Final = ("penstock.checkpointer.operations", "Operations")
_WATCHING: Final = (
    ("penstock.handlers.stores.local", "LocalStore"),
    ("penstock.steps.step_directory", "check_root"),
)
_STEPS: Final = (
    *_WATCHING,
    ("penstock.steps.step_watch", "Watch"),
    ("penstock.steps.save_queue", "StepSaves"),
)


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


async def load_operations(options: LoopOptions) -> None:
    """Load what a `Checkpointer` needs. Does nothing, and is no checkpoint, if that was done."""
    await _load((_OPERATIONS,), options)


async def load_steps(options: LoopOptions) -> None:
    """Load what a `CheckpointManager` needs. Does nothing, and is no checkpoint, if that was done."""
    await _load((_OPERATIONS, *_STEPS), options)


async def load_watching(options: LoopOptions) -> None:
    """Load what `watch` needs. Does nothing, and is no checkpoint, if that was done."""
    await _load(_WATCHING, options)


async def _load(wanted: Iterable[tuple[str, str]], options: LoopOptions) -> None:
    # A module is in `sys.modules` from the beginning of its import, which may be under way in a thread; its
    # names are not.
    missing = [home for home, last in wanted if not hasattr(sys.modules.get(home), last)]
    if missing:
        await import_beside_the_loop(lambda: [import_module(home) for home in missing], options)


def _import_everything() -> None:
    for home, _ in (_OPERATIONS, *_STEPS):
        import_module(home)
    for face in ("penstock", "penstock.orbax", "penstock.orbax.v1"):
        module = sys.modules.get(face)
        for name in () if module is None else module.__all__:
            getattr(module, name)  # imports its home
