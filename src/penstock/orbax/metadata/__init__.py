"""What is known of a stored tree without reading it, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "ArrayMetadata",
    "Metadata",
    "NamedShardingMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "SingleDeviceShardingMetadata",
    "StorageMetadata",
    "StringMetadata",
    "TreeMetadata",
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
