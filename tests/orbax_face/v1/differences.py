"""Where `penstock.orbax.v1` is not what `orbax.checkpoint.experimental.v1` of Orbax 0.12.8 is, and why.

The signature tests fail for a name that differs and is not here. docs/reference/orbax-differences.md has the
same: `python -m tests.orbax_face.differences` writes it.
"""

from __future__ import annotations

from typing import Final

DIFFERENCES: Final[dict[str, tuple[str, str]]] = {
    "training.Checkpointer": (
        (
            "`load_async` and `load_checkpointables_async` work. A step that is being saved is loaded once "
            "it is there. With `overwrite`, a step is replaced in one move when the new one is complete. A "
            "failure in the background is raised once. With `lightweight_initialize` steps can be listed."
        ),
        (
            "Orbax's raise NotImplementedError. It fails for a step that is not there yet and for a time "
            "that it has not read, and deletes the old step first, so that a crash loses both."
        ),
    ),
    "training.pathways": ("It is not there.", "It is for a backend that penstock does not support."),
    "load_async": (
        "It works for every layout, and its `checkpointable_name` is `AUTO` by default.",
        "Orbax's is for safetensors only. The default is that of `load`.",
    ),
    "load_checkpointables": (
        "What a handler of the caller's raises while it reads is raised as it is.",
        "Orbax raises a KeyError that says that the handler does not fit.",
    ),
    "load_checkpointables_async": ("It works.", "Orbax's raises NotImplementedError."),
    "AsyncResponse": ("It can be awaited, too.", "Code with an event loop should not block it."),
    "load": (
        "An abstract leaf that is None is loaded as it was saved.",
        "Orbax's documentation says so. Its code leaves None in the result, without a word.",
    ),
    "options.PyTreeOptions.Loading.partial_load": (
        "A struct or a type that the checkpoint has nothing for is a ValueError. Values are kept.",
        "Orbax returns the struct in the place of an array: a load that is partial in silence.",
    ),
    "save(overwrite=True)": (
        "What is there is replaced in one step when the new checkpoint is complete, if it is a checkpoint.",
        "Orbax first removes whatever is there, and has nothing if the save then fails.",
    ),
    "save": (
        "It is durable when it returns, and raises FileExistsErrors that are ValueErrors.",
        "Orbax does not fsync. Python has a word for what is there already.",
    ),
    "is_orbax_checkpoint": (
        "An empty directory, or one with other things in it, is none.",
        "Orbax takes any directory for one unless a checkpoint lies in or above it.",
    ),
    "partial.finalize": (
        "All bytes are copied once. Files of others among the parts are not taken along.",
        "The result is one checkpoint with one index and checksums. Orbax refuses such files.",
    ),
    "partial.save": (
        "Several processes that save together are refused.",
        "Nobody has asked for it yet. With a `primary_host` of None each process saves parts by itself.",
    ),
    "options.ArrayOptions.Saving.use_compression": (
        "Shards below 16 KiB, and arrays that zstd does not make smaller, are stored as they are.",
        "Noise costs three times the time for nothing. Orbax reads both.",
    ),
    "options.ArrayOptions.Saving.enable_replica_parallel_separate_folder": (
        "There is one database.",
        "What is in the database of a tree need not be merged into it.",
    ),
    "options.ArrayOptions.Loading.use_load_and_broadcast": (
        "Every process reads what it needs; without shardings, too.",
        "Broadcasting is not built yet. Orbax demands shardings with it.",
    ),
    "options.MemoryOptions": (
        (
            "`write_concurrent_bytes` and `transfer_concurrent_bytes` are one budget; None is the machine's. "
            "`regulator_options`, `expected_surge_bytes` and `serialization_status_callback` are without "
            "effect."
        ),
        "Bytes on the host are bytes on the host. A limit admits a request of its own size.",
    ),
    "options.MemoryOptions.deepcopy_host_arrays": (
        "NumPy arrays are always copied before `save_async` returns.",
        "Never a mixed checkpoint.",
    ),
    "options.PyTreeOptions.Saving.pytree_metadata_options": (
        "Rich types are read, and not written.",
        "They name classes by their modules, which move.",
    ),
    "options.AtomicityOptions": (
        "A checkpoint is built beside its place and renamed, whatever the mode, with the commit mark.",
        "Nothing half-written is ever visible.",
    ),
    "Context": (
        "Options given to the constructor are not warned of.",
        "They work.",
    ),
    "handlers.CheckpointableHandler": (
        "`isinstance` tells who has its methods.",
        "A protocol that can be asked is worth more.",
    ),
    "handlers.CheckpointableHandler.save": (
        "What it awaits and what it returns run in one loop, which is not the caller's.",
        "Orbax runs the two in two loops, of two threads. Context variables are those of the caller in both.",
    ),
    "handlers.PyTreeHandler": (
        "The default validator is not asked. No part of `ocdbt.process_0` is written.",
        "Every byte is counted before it is published. One process needs no merging.",
    ),
    "metadata": (
        "A tree that lacks its description, or whose description is damaged, is an error.",
        "Orbax returns None in its place, and an error when it is loaded.",
    ),
    "delete": (
        "The checkpoint, or the item, is renamed before it is removed.",
        "Orbax keeps a record beside it, to go on with a deletion that was interrupted.",
    ),
    "options.FileOptions": (
        "It, `AsyncOptions` and `MultiprocessingOptions` have no method `v0`.",
        "The established API has options of its own here.",
    ),
    "errors": (
        "Each is a `penstock.PenstockError`, too.",
        "One except clause is enough.",
    ),
}
