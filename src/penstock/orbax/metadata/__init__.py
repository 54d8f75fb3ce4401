"""What is known of a stored tree without reading it, under Orbax's names."""

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

from penstock.orbax.metadata import tree, value
from penstock.orbax.metadata.sharding import (
    NamedShardingMetadata,
    ShardingMetadata,
    SingleDeviceShardingMetadata,
)
from penstock.orbax.metadata.tree import TreeMetadata
from penstock.orbax.metadata.value import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
)
from penstock.orbax.step_metadata import (
    MetadataStore,
    RootMetadata,
    StepMetadata,
    get_step_metadata,
    metadata_store,
)
