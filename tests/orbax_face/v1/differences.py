"""Where `penstock.orbax.v1` is not what `orbax.checkpoint.experimental.v1` of Orbax 0.12.8 is, and why.

The signature tests fail for a name that differs and is not here. docs/reference/orbax-differences.md has the
same: `python -m tests.orbax_face.differences` writes it.
"""

from __future__ import annotations

from typing import Final

_NO_V0: Final = "Has no method `v0`: the established API has options of its own here."

DIFFERENCES: Final[dict[str, str]] = {
    "training.Checkpointer": (
        "`load_async` and `load_checkpointables_async` work; a step that is being saved is waited for. "
        "`overwrite` replaces in one move; Orbax deletes the old step first. With "
        "`lightweight_initialize` steps "
        "can be listed."
    ),
    "training.pathways": "Is not there: the backend is not supported.",
    "load_async": "Works for every layout, and its `checkpointable_name` is `AUTO` by default, as in `load`.",
    "load_checkpointables": "What a handler of the caller's raises is raised as it is, not as a KeyError.",
    "load_checkpointables_async": "Works; Orbax's raises NotImplementedError.",
    "AsyncResponse": "Can be awaited, too.",
    "load": (
        "An abstract leaf that is None is loaded as it was saved, as Orbax's documentation has it. From "
        "safetensors, a NumPy target gives a NumPy array, in Orbax a jax.Array."
    ),
    "options.PyTreeOptions.Loading": (
        "`on_missing='raise'`, which Orbax has not, makes a leaf that is not stored an error of a "
        "`partial_load`. Where another container is stored it is a ValueError, in Orbax mostly a TypeError."
    ),
    "save(overwrite=True)": (
        "A checkpoint is replaced in one step when the new one is complete, and nothing else is replaced."
    ),
    "save": "Is durable when it returns. Its FileExistsErrors are ValueErrors, too.",
    "is_orbax_checkpoint": "An empty directory, or one with other things in it, is none.",
    "partial.finalize": "Copies all bytes once, into one database. Files of others are not taken along.",
    "options.ArrayOptions.Saving.use_compression": (
        "Shards below 16 KiB, and what a codec does not make smaller, are stored as they are."
    ),
    "options.ArrayOptions.Loading.use_load_and_broadcast": (
        "Every process reads what it needs; without shardings, too."
    ),
    "options.MemoryOptions": (
        "`write_concurrent_bytes` and `transfer_concurrent_bytes` are one budget; None is the machine's."
    ),
    "options.AtomicityOptions": (
        "A checkpoint is built beside its place and renamed, whatever the mode, with the commit mark. "
        "There is "
        "no method `v0`."
    ),
    "Context": "Options given to the constructor are not warned of: they work.",
    "handlers.CheckpointableHandler": "`isinstance` tells who has its methods.",
    "handlers.CheckpointableHandler.save": (
        "What it awaits and what it returns run in one loop, which is not the caller's; in Orbax in two."
    ),
    "handlers.PyTreeHandler": (
        "`validate_leaves_handleable` and its twin for abstract leaves are not there: `save` and `load` "
        "check them."
    ),
    "metadata": "A description that is gone or damaged is an error, in Orbax None and a later error.",
    "delete": (
        "The checkpoint or item is renamed before it is removed; Orbax keeps a record beside it. What is "
        "neither is refused; Orbax removes any directory."
    ),
    "options.FileOptions": _NO_V0,
    "options.AsyncOptions": _NO_V0,
    "options.MultiprocessingOptions": _NO_V0,
    "errors": "Each is a `penstock.PenstockError`, too.",
}
