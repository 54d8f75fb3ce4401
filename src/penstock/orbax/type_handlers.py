"""The module `type_handlers` of Orbax's API: what writes and reads the leaves of each type."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "InvalidShardingError",
    "NumpyHandler",
    "ParamInfo",
    "PlaceholderHandler",
    "RestoreArgs",
    "SaveArgs",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TypeHandler",
    "TypeHandlerRegistry",
    "check_input_arguments",
    "create_type_handler_registry",
    "default_registry",
    "get_cast_tspec_deserialize",
    "get_cast_tspec_serialize",
    "get_json_tspec_read",
    "get_json_tspec_write",
    "get_ts_context",
    "get_type_handler",
    "has_type_handler",
    "is_ocdbt_checkpoint",
    "is_placeholder",
    "is_supported_empty_value",
    "is_supported_type",
    "merge_ocdbt_per_process_files",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
)

from penstock.orbax.common.leaf_args import (
    ArrayRestoreArgs,
    ParamInfo,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
    check_input_arguments,
)
from penstock.orbax.v0.leaf_handlers.array_handler import ArrayHandler
from penstock.orbax.v0.leaf_handlers.database_merging import (
    is_ocdbt_checkpoint,
    merge_ocdbt_per_process_files,
)
from penstock.orbax.v0.leaf_handlers.default_registry import (
    default_registry,
    get_type_handler,
    has_type_handler,
    is_placeholder,
    is_supported_empty_value,
    is_supported_type,
    register_standard_handlers_with_options,
    register_type_handler,
    supported_types,
)
from penstock.orbax.v0.leaf_handlers.numpy_handlers import NumpyHandler, ScalarHandler
from penstock.orbax.v0.leaf_handlers.single_replica_handler import (
    InvalidShardingError,
    SingleReplicaArrayHandler,
)
from penstock.orbax.v0.leaf_handlers.string_handler import StringHandler
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import (
    get_cast_tspec_deserialize,
    get_cast_tspec_serialize,
    get_json_tspec_read,
    get_json_tspec_write,
    get_ts_context,
)
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler
from penstock.orbax.v0.leaf_handlers.type_handler_registry import (
    PLACEHOLDER,
    PlaceholderHandler,
    TypeHandlerRegistry,
    create_type_handler_registry,
)
