"""All that a face over penstock is built with, next to the public names of `penstock` itself.

`penstock.orbax` imports this module, `penstock` and its public modules (`errors`, `handlers`, `items`,
`kernel`, `pipelines`, `steps`), and nothing else of ours; a test keeps it. A callback of another library or a
service would do likewise. What is a module here is a door: its names are used through it. Each name is
fetched from its own module when it is first used, so that importing this is light.

The engine and its options:
    TreeDirectory: Lets an `OrbaxLayout` store trees in directories that its caller publishes, without the
        documents of a checkpoint.
    ByteAccount: Bytes that are leased and given back, first come, first served.
    KnownValues: The values of the checkpoints that an engine has saved, for saves that link to them.
    RestoreOptions: The options of a restore, as one value; see `Checkpointer.restore_with`.
    BaseIfWhole: A checkpoint to link unchanged leaves to, if it is still whole.
    DirectoryBuild: A checkpoint of one process whose files its caller writes.
    JointBuild: A checkpoint whose files the callers in all processes of a job write, if none refuses to.
    SharedDirectory: A directory that the processes of a job fill together.
    act_on_answer: Lets the primary of a job find something out, and all processes act on it.
    limit_permissions: Takes permissions of a new directory away.

Trees and leaves:
    AdaptedHandler: A handler of batches, which writes its own files, as a handler of a pipeline.
    EMPTY_MARKERS: The recorded types of nodes with nothing in them.
    EmptyNamedTuple: Stands for a named tuple without fields.
    ReplicaAxis: The axis of a mesh along which the replicas of an array are.
    chunk_shapes: Functions that choose the shapes of chunks.
    dtypes: Names of dtypes, those of ml_dtypes included.
    prng_keys: Typed PRNG keys: their data and their implementation.
    flattening: Functions that take trees apart and put them together.
    pair_keys: Pairs the leaves of a target with those that are stored.
    describe_target: Describes the leaf of a target in an error.

Documents of a checkpoint:
    file_names: The names of what is in the directory of a checkpoint, and of unfinished ones.
    checkpoint_metadata: The document of a whole checkpoint, encoded and decoded.
    encode_strings: Encodes the document of the strings of a tree.
    document_files: Documents written durably, replaced and read, with the record of their digests.
    check_arrays: Compares stored arrays with their checksums.
    CHUNKED: Marks an array in msgpack that is cut into several values.

Stores and paths:
    paths: Paths and URLs as callers give them, and what they stand for.
    store_at: Returns the store of a path or a URL, or a snapshot to read one checkpoint from.
    deletion: Deletes files and what interrupted saves left.
    make_name_durable: Makes the name of a published checkpoint durable, or says that it may not be.
    find_place: Says what is at a path: a checkpoint, steps, safetensors, or a folder of such.

Steps:
    OpenSteps: The steps of a directory: listed, held, agreed on by all processes, and deleted.
    RootOptions: The options of a directory of steps, as one value.
    StepFiles: Names steps, finds them, and reads what policies look at.
    step_directory: The steps of a directory, listed, read and deleted.
    step_number: Returns the number of a step, or refuses it.
    steps_to_delete: Returns the steps that a policy does not keep.
    follows_from_step: Whether a policy says the same in all processes of a job.
    missing_metrics: Names the metrics that a policy needs and no step has.
    as_json_metrics: Returns metrics as JSON has them.

Threads, loops and events:
    blocking: The bridge between blocking callers and event loops: calls and resources in threads that have a
        loop, or none; calls posted to a loop; futures of threads awaited in one.
    failures: Failures that keep nothing of their callers alive, and show the frames of callers alone.
    lazy_names: Gives a package names that are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "CHUNKED",
    "EMPTY_MARKERS",
    "AdaptedHandler",
    "BaseIfWhole",
    "ByteAccount",
    "DirectoryBuild",
    "EmptyNamedTuple",
    "JointBuild",
    "KnownValues",
    "OpenSteps",
    "ReplicaAxis",
    "RestoreOptions",
    "RootOptions",
    "SharedDirectory",
    "StepFiles",
    "TreeDirectory",
    "act_on_answer",
    "as_json_metrics",
    "blocking",
    "check_arrays",
    "checkpoint_metadata",
    "chunk_shapes",
    "deletion",
    "describe_target",
    "document_files",
    "dtypes",
    "encode_strings",
    "failures",
    "file_names",
    "find_place",
    "flattening",
    "follows_from_step",
    "lazy_names",
    "limit_permissions",
    "make_name_durable",
    "missing_metrics",
    "pair_keys",
    "paths",
    "prng_keys",
    "step_directory",
    "step_number",
    "steps_to_delete",
    "store_at",
)

if TYPE_CHECKING:
    from penstock import blocking
    from penstock.directory_builds import (
        DirectoryBuild,
        JointBuild,
        SharedDirectory,
        act_on_answer,
        limit_permissions,
    )
    from penstock.handlers import dtypes
    from penstock.handlers.formats.orbax import checkpoint_documents as checkpoint_metadata
    from penstock.handlers.formats.orbax import document_files, file_names
    from penstock.handlers.formats.orbax import storage_choice as chunk_shapes
    from penstock.handlers.formats.orbax.item_survey import check_arrays
    from penstock.handlers.formats.orbax.msgpack_files import CHUNKED
    from penstock.handlers.formats.orbax.orbax_layout import TreeDirectory
    from penstock.handlers.formats.orbax.tree_metadata import encode_strings
    from penstock.handlers.layouts.discovery import find_place
    from penstock.handlers.leaves import prng_keys
    from penstock.handlers.leaves.adapted_handler import AdaptedHandler
    from penstock.handlers.leaves.empty import EmptyNamedTuple
    from penstock.handlers.leaves.single_replica import ReplicaAxis
    from penstock.handlers.stores.publishing import deletion, paths
    from penstock.handlers.stores.publishing.workspace import make_name_durable
    from penstock.kernel.lazy_names import lazy_names
    from penstock.kernel.memory.byte_account import ByteAccount
    from penstock.kernel.messages.restore import RestoreOptions
    from penstock.kernel.pipeline import failures
    from penstock.kernel.pipeline.run_context import BaseIfWhole
    from penstock.kernel.protocols.leaf import EMPTY_MARKERS
    from penstock.stages.planning.leaf_sources import describe_target
    from penstock.stages.planning.matching import pair_keys
    from penstock.stages.pytree import flattening
    from penstock.stages.reuse.value_cache import KnownValues
    from penstock.steps import step_directory
    from penstock.steps.catalogue import StepFiles
    from penstock.steps.keep_policies import steps_to_delete
    from penstock.steps.open_steps import OpenSteps
    from penstock.steps.opened_root import RootOptions
    from penstock.steps.save_policies import follows_from_step
    from penstock.steps.step_metrics import as_json_metrics, missing_metrics
    from penstock.steps.step_names import step_number
    from penstock.stores.store_finder import store_at
else:
    from importlib import import_module as _import_module

    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    _DOORS = {
        "blocking": "penstock.blocking",
        "checkpoint_metadata": "penstock.handlers.formats.orbax.checkpoint_documents",
        "chunk_shapes": "penstock.handlers.formats.orbax.storage_choice",
        "document_files": "penstock.handlers.formats.orbax.document_files",
        "deletion": "penstock.handlers.stores.publishing.deletion",
        "dtypes": "penstock.handlers.dtypes",
        "failures": "penstock.kernel.pipeline.failures",
        "file_names": "penstock.handlers.formats.orbax.file_names",
        "flattening": "penstock.stages.pytree.flattening",
        "paths": "penstock.handlers.stores.publishing.paths",
        "prng_keys": "penstock.handlers.leaves.prng_keys",
        "step_directory": "penstock.steps.step_directory",
    }
    _get, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.directory_builds": (
                "DirectoryBuild",
                "JointBuild",
                "SharedDirectory",
                "act_on_answer",
                "limit_permissions",
            ),
            "penstock.handlers.formats.orbax.tree_metadata": ("encode_strings",),
            "penstock.handlers.formats.orbax.msgpack_files": ("CHUNKED",),
            "penstock.handlers.formats.orbax.item_survey": ("check_arrays",),
            "penstock.handlers.formats.orbax.orbax_layout": ("TreeDirectory",),
            "penstock.handlers.layouts.discovery": ("find_place",),
            "penstock.handlers.leaves.empty": ("EmptyNamedTuple",),
            "penstock.handlers.leaves.single_replica": ("ReplicaAxis",),
            "penstock.kernel.memory.byte_account": ("ByteAccount",),
            "penstock.handlers.leaves.adapted_handler": ("AdaptedHandler",),
            "penstock.kernel.protocols.leaf": ("EMPTY_MARKERS",),
            "penstock.kernel.messages.restore": ("RestoreOptions",),
            "penstock.kernel.pipeline.run_context": ("BaseIfWhole",),
            "penstock.handlers.stores.publishing.workspace": ("make_name_durable",),
            "penstock.stages.planning.leaf_sources": ("describe_target",),
            "penstock.stages.planning.matching": ("pair_keys",),
            "penstock.stages.reuse.value_cache": ("KnownValues",),
            "penstock.steps.catalogue": ("StepFiles",),
            "penstock.steps.keep_policies": ("steps_to_delete",),
            "penstock.steps.open_steps": ("OpenSteps",),
            "penstock.steps.opened_root": ("RootOptions",),
            "penstock.steps.save_policies": ("follows_from_step",),
            "penstock.steps.step_metrics": (
                "as_json_metrics",
                "missing_metrics",
            ),
            "penstock.steps.step_names": ("step_number",),
            "penstock.stores.store_finder": ("store_at",),
        },
    )
    lazy_names = _lazy_names

    def __getattr__(name: str) -> object:
        return _import_module(_DOORS[name]) if name in _DOORS else _get(name)
