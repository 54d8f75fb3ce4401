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

from penstock.orbax.common import value_metadata as value
from penstock.orbax.common.sharding_metadata import (
    NamedShardingMetadata,
    ShardingMetadata,
    SingleDeviceShardingMetadata,
)
from penstock.orbax.common.value_metadata import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
)
from penstock.orbax.v0.common import stored_tree_metadata as tree
from penstock.orbax.v0.common.step_metadata import (
    MetadataStore,
    RootMetadata,
    StepMetadata,
    get_step_metadata,
    metadata_store,
)
from penstock.orbax.v0.common.stored_tree_metadata import TreeMetadata
