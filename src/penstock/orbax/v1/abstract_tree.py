"""Trees as stored and as asked for: the options of penstock's `save` and `restore`."""

from __future__ import annotations

__all__ = ("LoadPlan", "StoredTree", "leaf_metadata", "plan_load", "read_tree", "save_format_of")

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as partial_of
from typing import Any, Final, final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Sharding

from penstock import SaveFormat, kernel
from penstock import handlers as built_in
from penstock.embedding import RestoreOptions, dtypes, file_names, flattening, pair_keys
from penstock.errors import NotACheckpointError
from penstock.orbax.arrays import is_narrowed, jax_dtype, number_type
from penstock.orbax.item_files import store_at
from penstock.orbax.restore_tree import LeafTarget, clashing_keys
from penstock.orbax.v1.options import ArrayOptions
from penstock.orbax.v1.tree import PLACEHOLDER, has_attributes, is_supported_abstract_leaf, is_supported_leaf
from penstock.orbax.value_metadata import StorageMetadata, ZarrMetadata, from_serialized_string

_jax: Any = jax

_tree: Any = tree_util  # jax declares no types for it

_PYTHON: Final = (bool, int, float)

Finish = Callable[[Any], Any]


@final
@dataclass(frozen=True, slots=True)
class StoredTree:
    """The recorded description of each leaf of a tree, in order."""

    keys: Sequence[kernel.KeyPath]
    kinds: Sequence[tuple[Any, ...]]
    specs: Sequence[kernel.LeafSpec]
    documents: Sequence[Mapping[str, Any] | None]  #: of arrays in zarr, their metadata


def read_tree(directory: str) -> StoredTree:
    """Read the documents of the tree in a directory. Blocking.

    Raises:
        NotACheckpointError: If there is none. It is a FileNotFoundError.
        CorruptCheckpointError: If it is damaged.
    """
    store = store_at(directory, snapshot=True)
    if store.kind(os.path.join(directory, file_names.METADATA)) is None:
        raise NotACheckpointError(directory, f"holds no tree: it has no {file_names.METADATA}")

    checkpoint = built_in.OrbaxLayout().open(store, directory)
    leaves = checkpoint.leaves
    documents = [checkpoint.zarr_metadata(number) for number in range(len(leaves))]
    return StoredTree(leaves.keys, leaves.kinds, leaves.specs, documents)


def save_format_of(saving: ArrayOptions.Saving, *, jointly: bool = False) -> SaveFormat:
    """Return the save format that the options of a tree describe.

    Args:
        saving: The options.
        jointly: Whether several processes save it together.
    """
    parallel = saving.use_replica_parallel
    least, most = saving.min_slice_bytes_for_replica_parallel, saving.max_replicas_for_replica_parallel
    form = SaveFormat(
        ocdbt=saving.use_ocdbt,
        zarr=3 if saving.use_zarr3 else 2,
        codec="auto" if saving.use_compression else "none",
        ocdbt_target_data_file_size=saving.ocdbt_target_data_file_size if saving.use_ocdbt else None,
    )
    if not jointly:
        return form

    return replace(
        form,
        replica_parallel=parallel is not False,
        replica_parallel_min_bytes=form.replica_parallel_min_bytes if least is None else least,
        replica_parallel_max_replicas=most,
    )


@final
@dataclass(slots=True)
class LoadPlan:
    """The target and the options of a restore that loads a tree as requested."""

    like: Any = ...
    options: RestoreOptions = field(default_factory=RestoreOptions)
    finishes: dict[int, Finish] = field(default_factory=dict[int, Finish])  #: by place in flatten order
    asked: dict[kernel.KeyPath, Any] = field(
        default_factory=dict[kernel.KeyPath, Any]
    )  #: of leaves with their own handlers

    def finish(self, tree: Any) -> Any:
        """Convert what was restored to what was requested, with dicts in the order of their names."""
        leaves, treedef = flattening.flatten_tree(tree)
        values = [leaf.value for leaf in leaves]
        for at, finish in self.finishes.items():
            values[at] = finish(values[at])

        return _tree.tree_unflatten(treedef, values)


def plan_load(
    abstract: Any,
    stored: StoredTree,
    *,
    partial: bool = False,
    keeps_missing: bool = True,
    resize: bool = False,
    custom: Mapping[str, type[Any]] | None = None,
) -> LoadPlan:
    """Decide the target and the options of `restore`.

    Args:
        abstract: The requested tree: values, structs, types, None for as stored, or placeholders.
        stored: The description of the stored tree.
        partial: Whether leaves may be left out of `abstract`, and others be there.
        keeps_missing: Whether leaves that are not stored are those of a partial result.
        resize: Whether arrays may be padded and truncated.
        custom: The types of leaves that user-defined handlers saved, by recorded name.

    Raises:
        ValueError: If they do not fit.
    """
    wanted, treedef = flattening.flatten_tree(abstract)
    specs = dict(zip(stored.keys, stored.specs, strict=True))
    _check_keys(wanted, stored, partial=partial, keeps_missing=keeps_missing)

    plan, likes, left_out, kept = LoadPlan(), list[Any](), dict[kernel.KeyPath, None](), False
    casts: dict[kernel.KeyPath, Any] = {}
    resized = False
    for at, leaf in enumerate(wanted):
        spec = specs.get(leaf.info.keys)
        if leaf.value is PLACEHOLDER and spec is not None:
            left_out[leaf.info.keys] = None
        if spec is None or leaf.value is PLACEHOLDER:
            # `restore` keeps no leaf that only describes one.
            stays = is_supported_leaf(leaf.value) or flattening.is_empty(leaf.value)
            likes.append(leaf.value if stays else PLACEHOLDER)
            if not stays:
                plan.finishes[at] = partial_of(_kept, leaf.value)
            kept = kept or partial or not flattening.is_empty(leaf.value)
            continue
        if spec.typestr in (custom or {}):
            plan.asked[leaf.info.keys] = leaf.value
            likes.append((custom or {})[spec.typestr])
            continue

        one = _leaf_target(leaf.value, spec, resize=resize)
        likes.append(one.like)
        if one.finish is not None:
            plan.finishes[at] = one.finish
        if one.dtype is not None:
            casts[leaf.info.keys] = one.dtype

        resized = resized or one.resized

    plan.like = _tree.tree_unflatten(treedef, likes)
    plan.options = RestoreOptions(
        rename=left_out if kept else None,  # placeholders, and values that the checkpoint lacks
        on_missing="keep" if kept else "raise",
        on_unexpected="skip" if partial else "raise",
        dtype=casts.get if casts else None,
        strict=not resized,
    )
    return plan


def _kept(value: Any, _restored: object) -> Any:
    return value


def _check_keys(wanted: Sequence[Any], stored: StoredTree, *, partial: bool, keeps_missing: bool) -> None:
    """Refuse leaves that only one side has. `restore` compares empty containers."""
    pairing = pair_keys([leaf.info.keys for leaf in wanted], stored.keys)
    missing = [wanted[at] for at in pairing.missing]
    missing = [leaf for leaf in missing if not (flattening.is_empty(leaf.value) or leaf.value is PLACEHOLDER)]
    refused: Collection[kernel.KeyPath] = {leaf.info.keys for leaf in missing}
    if partial and keeps_missing and missing:
        indices = [[kind is kernel.KeyKind.SEQUENCE for kind in kinds] for kinds in stored.kinds]
        refused = clashing_keys(refused, dict(zip(stored.keys, indices, strict=True)))

    problems = [
        f"{leaf.info.key_path}: requested, but not in the checkpoint"
        for leaf in missing
        if leaf.info.keys in refused
    ]
    if not partial:
        unexpected = [(stored.keys[row], stored.specs[row]) for row in pairing.unexpected]
        problems += [
            f"{'.'.join(keys)}: in the checkpoint, but not requested"
            for keys, spec in unexpected
            if not spec.is_empty_marker
        ]
    if problems:
        raise mismatch(problems)


def mismatch(problems: Sequence[str]) -> ValueError:
    """Return the error for trees that do not match; it begins with the same words as Orbax's."""
    shown = [*problems[:40], *([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])]
    return ValueError(
        "User-provided restore item and on-disk value metadata tree structures do not match:\n  "
        + "\n  ".join(shown)
    )


def _leaf_target(abstract: Any, spec: kernel.LeafSpec, *, resize: bool) -> LeafTarget:
    if spec.typestr == "None" and is_supported_abstract_leaf(abstract):
        return LeafTarget(None)  # it was masked when it was saved
    if spec.is_empty_marker:
        return LeafTarget(empty_value(spec) if abstract is None else abstract)
    if abstract is None or spec.shape is None:
        return _as_saved(spec) if abstract is None else LeafTarget(abstract)

    kind = abstract if isinstance(abstract, type) else type(abstract)
    if has_attributes(kind, "shape", "dtype", "sharding"):
        return _array(None if abstract is kind else abstract, spec, resize=resize)
    if has_attributes(kind, "shape", "dtype"):
        struct: Any = abstract
        return _host_array(spec, None if abstract is kind else struct.dtype)
    if issubclass(kind, _PYTHON):
        return _number(kind, spec)

    return LeafTarget(kind)


def _as_saved(spec: kernel.LeafSpec) -> LeafTarget:
    """Request a leaf as it was saved; a jax.Array of a dtype that jax has here."""
    if spec.typestr == "jax.Array" and spec.shape is not None and is_narrowed(spec.dtype):
        return LeafTarget(jax.Array, jax_dtype(spec.dtype))

    return LeafTarget(_as_stored(spec))


def _as_stored(spec: kernel.LeafSpec) -> Any:
    """Return the type that a leaf had when it was saved."""
    match spec.typestr:
        case "jax.Array":
            return jax.Array
        case "np.ndarray":
            return np.ndarray
        case "scalar":
            return number_type(spec.dtype)
        case "string":
            return str
        case _:
            return None


def _array(abstract: Any, spec: kernel.LeafSpec, *, resize: bool) -> LeafTarget:
    if abstract is None:
        return _as_saved(spec)

    shape: Any = abstract.shape if abstract.shape is not None else spec.shape
    dtype: Any = abstract.dtype if abstract.dtype is not None else dtypes.numpy_dtype(spec.dtype)
    if is_narrowed(dtype):
        dtype = jax_dtype(dtype)
    sharding, finish = _placement(abstract)
    if _jax.dtypes.issubdtype(dtype, _jax.dtypes.prng_key):
        return LeafTarget(_jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), finish=finish)
    if tuple(shape) != spec.shape and not resize:
        raise ValueError(
            f"Requested shape: {tuple(shape)} is not compatible with the stored shape: {spec.shape}. To pad "
            "and truncate, set `enable_padding_and_truncation=True` in `ArrayOptions.Loading`."
        )

    impl = spec.extended_dtype
    if impl is not None:  # requested as key data, as an abstract tree describes it
        finish = partial_of(_wrap_key, impl)

    changed = None if dtypes.dtype_name(np.dtype(dtype)) == spec.dtype else dtype
    like = _jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return LeafTarget(like, changed, finish, resized=tuple(shape) != spec.shape)


def _wrap_key(impl: str, data: Any) -> Any:
    return _jax.random.wrap_key_data(data, impl=impl)


def _placement(abstract: Any) -> tuple[Sharding | None, Finish | None]:
    """Return the sharding of an array, and the function that applies a requested memory layout."""
    sharding: Any = abstract.sharding
    if sharding is None or isinstance(sharding, Sharding):
        return sharding, None
    if hasattr(sharding, "to_jax_sharding"):
        of_orbax: Any = sharding
        return of_orbax.to_jax_sharding(), None

    return sharding.sharding, lambda array: _jax.device_put(array, sharding)


def _host_array(spec: kernel.LeafSpec, dtype: Any, finish: Finish | None = None) -> LeafTarget:
    """Request a NumPy array of the stored shape."""
    stored = dtypes.numpy_dtype(spec.dtype)
    if dtype is None or isinstance(dtype, property) or np.dtype(dtype) == stored:
        return LeafTarget(np.ndarray, finish=finish)

    # A view of one element says shape and dtype and holds no memory.
    like = np.broadcast_to(np.zeros((), np.dtype(dtype)), spec.shape or ())
    return LeafTarget(like, np.dtype(dtype), finish=finish)


def _number(kind: type[Any], spec: kernel.LeafSpec) -> LeafTarget:
    """Request a Python number, converted from whatever is stored."""
    if spec.shape != ():
        raise ValueError(f"Restored result is not a scalar: it has the shape {spec.shape}.")
    if spec.typestr == "scalar" and _as_stored(spec) is kind:
        return LeafTarget(kind)

    return _host_array(spec, None, lambda array: kind(array.item()))


@dataclass
class ArrayMetadata:
    """Describes a jax.Array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    sharding_metadata: Any
    storage_metadata: Any

    @property
    def sharding(self) -> Sharding | None:
        """The sharding it was saved with.

        Raises:
            ValueError: If its devices are not here.
        """
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclass
class NumpyShapeDtype:
    """The abstract leaf of a NumPy array."""

    shape: tuple[int, ...] | None
    dtype: Any


@dataclass
class NumpyMetadata:
    """Describes a NumPy array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    storage_metadata: Any


_EMPTY: Final[dict[str, type[Any]]] = {"Dict": dict, "List": list, "Tuple": tuple}


def leaf_metadata(spec: kernel.LeafSpec, document: Mapping[str, Any] | None = None) -> Any:
    """Describe a leaf: arrays by their metadata, numbers and strings by an example.

    Args:
        spec: What is stored.
        document: Of an array in zarr, its metadata there.
    """
    match spec.typestr:
        case "jax.Array":
            sharding = _sharding(spec.sharding) if spec.sharding else None
            zarr = ZarrMetadata.from_json(document)
            storage = StorageMetadata(spec.chunk_shape, spec.write_shape, zarr)
            return ArrayMetadata(spec.shape, dtypes.numpy_dtype(spec.dtype), sharding, storage)
        case "np.ndarray":
            storage = StorageMetadata(spec.chunk_shape, None, ZarrMetadata.from_json(document))
            return NumpyMetadata(spec.shape, dtypes.numpy_dtype(spec.dtype), storage)
        case "scalar":
            return 0 if np.issubdtype(dtypes.numpy_dtype(spec.dtype), np.integer) else 0.0
        case "string":
            return "string"
        case _ if spec.is_empty_marker:
            return empty_value(spec)
        case typestr:
            return typestr


def _sharding(text: str) -> Any:
    """Read a recorded sharding; None for a kind that jax no longer has."""
    try:
        return from_serialized_string(text)
    except (ValueError, NotImplementedError, KeyError):
        return None


def empty_value(spec: kernel.LeafSpec) -> Any:
    """Return the empty container, or None, that a marker stands for."""
    kind = _EMPTY.get(spec.typestr)
    return None if kind is None else kind()
