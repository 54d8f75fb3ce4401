"""Descriptions of stored trees and leaves, made without reading them, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "ArrayMetadata",
    "Metadata",
    "MetadataStore",
    "NamedShardingMetadata",
    "RootMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "SingleDeviceShardingMetadata",
    "StepMetadata",
    "StorageMetadata",
    "StringMetadata",
    "TreeMetadata",
    "get_step_metadata",
    "metadata_store",
    "tree",
    "value",
)

from penstock.orbax import stored_tree_metadata as tree
from penstock.orbax import value_metadata as value
from penstock.orbax.step_metadata import (
    MetadataStore,
    RootMetadata,
    StepMetadata,
    get_step_metadata,
    metadata_store,
)
from penstock.orbax.stored_tree_metadata import TreeMetadata
from penstock.orbax.value_metadata import (
    ArrayMetadata,
    Metadata,
    NamedShardingMetadata,
    ScalarMetadata,
    ShardingMetadata,
    SingleDeviceShardingMetadata,
    StorageMetadata,
    StringMetadata,
)
