"""Trees of arrays, numbers, strings and whatever else has a type handler, with transforms."""

from __future__ import annotations

__all__ = ("PyTreeCheckpointHandler", "PyTreeRestoreArgs", "PyTreeSaveArgs")

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jax import tree_util

from penstock.embedding import file_names
from penstock.errors import NotACheckpointError, SpecError, UnsupportedFormatError
from penstock.orbax.base_pytree_handler import (
    BasePyTreeCheckpointHandler,
    BasePyTreeRestoreArgs,
    BasePyTreeSaveArgs,
    TreeHandler,
)
from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    register_with_handler,
)
from penstock.orbax.future import Future
from penstock.orbax.installation import stand_for
from penstock.orbax.item_files import bucket_url, path_text, place_of
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs
from penstock.orbax.metadata import TreeMetadata, ValueMetadataEntry
from penstock.orbax.options import MemoryLimitOptions, MultiprocessingOptions, PyTreeMetadataOptions
from penstock.orbax.restore_tree import empty_value
from penstock.orbax.serialization import get_ts_context
from penstock.orbax.transform_utils import RestoreTransform, Transform, apply_transformations
from penstock.orbax.tree import from_flat_dict, is_empty_node, str_keypath, to_flat_dict
from penstock.orbax.value_metadata import Metadata

_tree: Any = tree_util  # jax declares no types for it

_UNSET: Final[Any] = object()


class PyTreeCheckpointHandler(TreeHandler):
    """Saves and restores trees. Use it through a `Checkpointer`, which makes saves atomic.

    Args:
        aggregate_filename: Of the file of values that Orbax wrote before 0.5.16. It is no longer written. It
            is read if it is called `checkpoint`, as by default; a tree with one of another name is refused.
        save_concurrent_gb: Gigabytes of host memory that saves may hold; by default as much as the
            machine can spare.
        restore_concurrent_gb: Likewise for restores.
        save_device_host_concurrent_gb: Gigabytes copied from devices at once, or `"auto"`.
        memory_limit_options: The upper limit of `"auto"`.
        use_ocdbt: Whether all arrays are in one OCDBT database; else each in its own directory.
        use_zarr3: Whether arrays are of zarr version 3; else 2.
        use_compression: Whether chunks that compress well are compressed.
        multiprocessing_options: Which processes save.
        type_handler_registry: Handlers of leaf types; by default those registered for the process.
        handler_impl: Does the work; by default it is made from the other options.
        pytree_metadata_options: How structure is recorded.
        array_metadata_validator: Has no effect: every byte is counted before a save is complete.
        enable_pinned_host_transfer: Has no effect: jax chooses how to copy.
        is_prioritized_key_fn: Decides which leaves are copied first.
        concurrent_gb: The older name, as of 2024, of both `save_concurrent_gb` and `restore_concurrent_gb`.
        primary_host: The older name, as of 2024, of what is in `multiprocessing_options`.

    Raises:
        ValueError: If `"auto"` is given without `memory_limit_options`.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    _DURABLE = True
    _SAVES_TOGETHER = True
    _BLOCKS = True

    def __init__(
        self,
        aggregate_filename: str | None = None,
        *,
        save_concurrent_gb: int | None = None,
        restore_concurrent_gb: int | None = None,
        save_device_host_concurrent_gb: int | Literal["auto"] | None = None,
        memory_limit_options: MemoryLimitOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        type_handler_registry: Any = None,
        handler_impl: BasePyTreeCheckpointHandler | None = None,
        pytree_metadata_options: PyTreeMetadataOptions = PyTreeMetadataOptions(),
        array_metadata_validator: Any = None,
        enable_pinned_host_transfer: bool | None = None,
        is_prioritized_key_fn: Callable[[tuple[Any, ...]], Any] | None = None,
        concurrent_gb: int | None = None,
        primary_host: int | None = _UNSET,
    ) -> None:
        if primary_host is not _UNSET:
            multiprocessing_options = MultiprocessingOptions(primary_host=primary_host)
        if concurrent_gb is not None:
            save_concurrent_gb = save_concurrent_gb or concurrent_gb
            restore_concurrent_gb = restore_concurrent_gb or concurrent_gb

        stand_for("PyTreeCheckpointHandler", PyTreeCheckpointHandler)
        self._aggregate_filename = aggregate_filename or file_names.LEGACY_MSGPACK  # paxml writes one itself
        self._primary_host = multiprocessing_options.primary_host
        self._handler_impl = handler_impl or BasePyTreeCheckpointHandler(
            save_concurrent_bytes=_bytes(save_concurrent_gb),
            restore_concurrent_bytes=_bytes(restore_concurrent_gb),
            save_device_host_concurrent_bytes=(
                "auto" if save_device_host_concurrent_gb == "auto" else _bytes(save_device_host_concurrent_gb)
            ),
            memory_limit_options=memory_limit_options,
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            multiprocessing_options=multiprocessing_options,
            type_handler_registry=type_handler_registry,
            pytree_metadata_options=pytree_metadata_options,
            array_metadata_validator=array_metadata_validator,
            enable_pinned_host_transfer=enable_pinned_host_transfer,
            is_prioritized_key_fn=is_prioritized_key_fn,
        )

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: PyTreeSaveArgs | None = None,
    ) -> Sequence[Future] | None:
        """Copy a tree and begin to write it; the tree may change when this returns.

        Args:
            directory: That exists, or is being created.
            item: The tree, if there are no `args`.
            save_args: A tree of `SaveArgs` like it, if there are no `args`.
            args: What to save, and how.

        Returns:
            Futures that are over when everything is durable.

        Raises:
            ValueError: If the tree is empty, or has leaves that cannot be saved.
        """
        return await self._handler_impl.async_save(directory, args=_base_save_args(item, save_args, args))

    def save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: PyTreeSaveArgs | None = None,
    ) -> None:
        """Write a tree; return when it is durable. See `async_save`."""
        self._handler_impl.save(directory, args=_base_save_args(item, save_args, args))

    def restore(
        self,
        directory: Any,
        item: Any = None,
        restore_args: Any = None,
        transforms: Any = None,
        transforms_default_to_original: bool = True,
        legacy_transform_fn: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        args: PyTreeRestoreArgs | None = None,
    ) -> Any:
        """Return the tree in a directory.

        Args:
            directory: That was saved to.
            item: See `PyTreeRestoreArgs`; all but `args` count only if there are no `args`.
            restore_args: See `PyTreeRestoreArgs`.
            transforms: See `PyTreeRestoreArgs`.
            transforms_default_to_original: See `PyTreeRestoreArgs`.
            legacy_transform_fn: See `PyTreeRestoreArgs`.
            args: What to restore, and how.

        Raises:
            FileNotFoundError: If there is nothing.
            ValueError: If the item and the stored tree differ in structure, a leaf cannot be restored as
                requested, arguments contradict each other, or the directory is damaged.
        """
        if isinstance(item, CheckpointArgs):
            raise ValueError("Make sure to specify kwarg name `args=` when providing `PyTreeRestoreArgs`.")

        path = path_text(directory)
        if bucket_url(path) is None and not os.path.isdir(path):
            raise NotACheckpointError(path, "Requested directory for restore does not exist")

        self._refuse_other_name(path)
        if args is None:
            args = PyTreeRestoreArgs(
                item, restore_args, transforms, transforms_default_to_original, legacy_transform_fn
            )

        if args.transforms is None and args.legacy_transform_fn is None:
            plain = BasePyTreeRestoreArgs(args.item, args.restore_args, args.partial_restore, args.on_missing)
            return self._handler_impl.restore(directory, args=plain)

        return restore_transformed(args, self._handler_impl, place_of(directory))

    def metadata(self, directory: Any) -> TreeMetadata:
        """Return what is known of each leaf, in a tree of dicts and lists.

        Raises:
            FileNotFoundError: If there is no tree.
            ValueError: If it is damaged.
        """
        self._refuse_other_name(path_text(directory))
        found: TreeMetadata = self._handler_impl.metadata(directory)
        return found

    def _get_internal_metadata(self, directory: Any) -> tuple[Any, bool | None]:
        """Return the stored structure as a `legacy_transform_fn` gets it, and whether arrays are zarr 3.

        T5X chooses by it what a restore reads.
        """
        place = place_of(directory)
        structure, _ = _shown(self._handler_impl, place)
        return structure, self._handler_impl.metadata(place).use_zarr3

    @property
    def base(self) -> BasePyTreeCheckpointHandler:
        return self._handler_impl

    def _refuse_other_name(self, directory: str) -> None:
        """Refuse a tree that has a file of values which penstock would not find, and so not read."""
        name = self._aggregate_filename
        if name != file_names.LEGACY_MSGPACK and os.path.isfile(os.path.join(directory, name)):
            problem = f"its values lie in {name!r}: rename that file to {file_names.LEGACY_MSGPACK!r}"
            raise UnsupportedFormatError(directory, problem)


@register_with_handler(PyTreeCheckpointHandler, for_save=True)
@dataclass
class PyTreeSaveArgs(CheckpointArgs):
    """The object of a save, and its options.

    Attributes:
        item: A tree.
        save_args: A tree of `SaveArgs` like it; None, for a leaf or for all, means the defaults.
        ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
        custom_metadata: JSON kept with the tree.

    Raises:
        ValueError: If the item is a `TreeMetadata`.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            raise ValueError("Cannot save TreeMetadata.")


@register_with_handler(PyTreeCheckpointHandler, for_restore=True)
@dataclass
class PyTreeRestoreArgs(CheckpointArgs):
    """The target of a restore, and its options. Trees may be `TreeMetadata`.

    Attributes:
        item: A tree of the structure of the result; its leaves may be anything, and one that is
            `PLACEHOLDER` is not restored. By default the stored structure, in dicts and lists.
        restore_args: A tree of `RestoreArgs`, like the item or else like the stored tree.
        transforms: Regular expressions over keys joined by slashes -> `Transform`s; needs an item.
        transforms_default_to_original: Whether leaves without a transform come from what is stored, or
            are those of the item.
        legacy_transform_fn: Called with the item, the stored structure and a tree of `ParamInfo`s;
            returns the structure to restore, and the `ParamInfo`s of its leaves.
        partial_restore: Whether the item may lack leaves that are stored, and have leaves that are not.
        on_missing: What a leaf that is not stored is in a partial restore: the item's own in the result,
            or an error. penstock's.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    partial_restore: bool = False
    on_missing: Literal["keep", "raise"] = "keep"

    def __post_init__(self) -> None:
        self.item = _tree_of(self.item)
        self.restore_args = _tree_of(self.restore_args)
        self.transforms = _tree_of(self.transforms)


def _tree_of(tree: Any) -> Any:
    return tree.tree if isinstance(tree, TreeMetadata) else tree


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 10**9)


def _base_save_args(item: Any, save_args: Any, args: PyTreeSaveArgs | None) -> BasePyTreeSaveArgs:
    if isinstance(item, CheckpointArgs):
        raise ValueError("Make sure to specify kwarg name `args=` when providing `PyTreeSaveArgs`.")
    if args is None:
        args = PyTreeSaveArgs(item, save_args)

    return BasePyTreeSaveArgs(
        args.item, args.save_args, args.ocdbt_target_data_file_size, args.custom_metadata
    )


def restore_transformed(args: PyTreeRestoreArgs, handler: BasePyTreeCheckpointHandler, directory: Any) -> Any:
    """Restore as `transforms` or `legacy_transform_fn` say. Leaves that no result needs are not read.

    Args:
        args: The request.
        handler: Restores without transformations.
        directory: Of the tree.

    Raises:
        ValueError: If both are given, if transforms lack an item or restore_args, or if a needed leaf
            is not stored.
    """
    if args.legacy_transform_fn is not None:
        if args.transforms is not None:
            raise ValueError("Cannot provide both `transforms` and `legacy_transform_fn`.")
        return _by_function(args, handler, directory)
    if args.item is None:
        raise ValueError(
            "If providing `transforms`, must provide `item` matching structure of expected result."
        )
    if args.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `restore_args` matching structure of expected result."
        )

    about = handler.metadata(directory).tree
    plan = _Plan.make(args, to_flat_dict(about, sep="/", is_leaf=_is_metadata))
    values = _read(plan.needed, about, handler, directory)
    original = _replaced(about, values)
    rules = {key: _bound(rule, plan.restore_args) for key, rule in plan.rules.items()}
    return apply_transformations(original, rules, args.item, args.transforms_default_to_original)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The stored leaves that are read, each with its options."""

    rules: Mapping[str, Transform]
    restore_args: Mapping[str, RestoreArgs]  #: by key in the result
    needed: Mapping[str, RestoreArgs]  #: by stored key

    @classmethod
    def make(cls, args: PyTreeRestoreArgs, stored: Mapping[str, Any]) -> _Plan:
        """Look at the rules in their order. The first that needs a stored leaf says how it is restored."""
        rules: dict[str, Transform] = to_flat_dict(args.transforms, sep="/")
        restore_args: dict[str, RestoreArgs] = to_flat_dict(args.restore_args, sep="/")
        needed: dict[str, RestoreArgs] = {}
        to_original = args.transforms_default_to_original
        result = to_flat_dict(args.item, sep="/")
        left = dict(result)
        for pattern, rule in rules.items():
            for wanted, asked in _inputs(rule).items():
                needed = {key: asked for key in stored if re.fullmatch(wanted, key)} | needed

            matching = [(key, found) for key in result if (found := re.fullmatch(pattern, key))]
            for key, found in matching:
                left.pop(key, None)
                source = _source(key, rule, found, to_original=to_original)
                if source is not None and source in stored:
                    needed.setdefault(source, restore_args.get(key, RestoreArgs()))

        for key in left if to_original else ():
            if key in stored:
                needed.setdefault(key, restore_args.get(key, RestoreArgs()))

        return cls(rules, restore_args, needed)


def _inputs(rule: Transform) -> Mapping[str, RestoreArgs]:
    """Return the stored leaves that a function of several leaves needs.

    Raises:
        ValueError: If it does not name them.
    """
    if rule.multi_value_fn is None:
        return {}
    if not isinstance(rule, RestoreTransform):
        raise ValueError("Must use RestoreTransform in order to use multi_value_fn during restore.")
    if rule.multi_value_fn_input_args is None:
        raise ValueError("`multi_value_fn` was specified, but `multi_value_fn_input_args` were not.")

    return rule.multi_value_fn_input_args


def _source(key: str, rule: Transform, found: re.Match[str], *, to_original: bool) -> str | None:
    """Name the stored leaf that a rule needs for a leaf of the result; None for a function of several."""
    if rule.multi_value_fn is not None:
        return None
    if rule.use_fallback:
        return None if to_original else key

    original = rule.original_key
    if isinstance(original, tuple):
        original = "/".join(original)

    return key if original is None else found.expand(original)


def _read(
    needed: Mapping[str, RestoreArgs], about: Any, handler: BasePyTreeCheckpointHandler, directory: Any
) -> dict[str, Any]:
    """Restore the leaves that are needed, by stored key. Others are not read."""
    if not needed:
        return {}

    paths = to_flat_dict(about, is_leaf=_is_metadata)
    wanted = {path: needed["/".join(path)] for path in paths if "/".join(path) in needed}
    item = from_flat_dict(dict.fromkeys(wanted, 0))
    asked = BasePyTreeRestoreArgs(item, from_flat_dict(dict(wanted)), partial_restore=True)
    restored = handler.restore(directory, args=asked)
    return {
        "/".join(path): value
        for path, value in to_flat_dict(restored, is_leaf=lambda node: not isinstance(node, dict)).items()
    }


def _replaced(about: Any, values: Mapping[str, Any]) -> Any:
    """The stored tree with the values that were read; other leaves stay metadata."""
    keys = iter(to_flat_dict(about, sep="/", is_leaf=_is_metadata))

    def value(leaf: Any) -> Any:
        return values.get(next(keys), leaf)

    return _tree.tree_map(value, about, is_leaf=_is_metadata)


def _bound(rule: Transform, restore_args: Mapping[str, RestoreArgs]) -> Transform:
    """Pass the restore_args of the result to a function of several leaves."""
    function = rule.multi_value_fn
    if function is None:
        return rule

    def call(key: str, tree: Any) -> Any:
        return function(key, tree, restore_args[key])

    return Transform(multi_value_fn=call)


def _by_function(args: PyTreeRestoreArgs, handler: BasePyTreeCheckpointHandler, directory: Any) -> Any:
    """Let the caller's function map each leaf of the result to a stored one, of this tree or of another."""
    assert args.legacy_transform_fn is not None
    structure, chosen = args.legacy_transform_fn(args.item, *_shown(handler, directory))
    flat = to_flat_dict(chosen, is_leaf=lambda node: isinstance(node, ParamInfo))
    asked = {} if args.restore_args is None else to_flat_dict(args.restore_args)
    shown = to_flat_dict(structure, is_leaf=_is_entry)
    # A leaf that several results want otherwise is read once for each way.
    needed: dict[Any, list[dict[str, RestoreArgs]]] = {}
    turns: dict[tuple[str, ...], int] = {}
    for path, info in flat.items():
        if isinstance(info, ParamInfo) and not info.skip_deserialize:
            how = _of_type(asked.get(path, RestoreArgs()), shown.get(path))
            rounds = needed.setdefault(info.parent_dir, [])
            fits = (turn for turn, names in enumerate(rounds) if names.get(info.name, how) == how)
            turns[path] = turn = next(fits, len(rounds))
            if turn == len(rounds):
                rounds.append({})
            rounds[turn][info.name] = how

    values = {place: [_named(names, handler, place) for names in rounds] for place, rounds in needed.items()}

    def value(path: tuple[str, ...], in_structure: Any) -> Any:
        info = flat.get(path)
        if not isinstance(info, ParamInfo) or info.skip_deserialize:
            return empty_value(in_structure.value_type) if _is_entry(in_structure) else in_structure

        return values[info.parent_dir][turns[path]][info.name]

    made = {path: value(path, leaf) for path, leaf in shown.items()}
    return from_flat_dict(made, target=_tree.tree_map(_zero, structure, is_leaf=_is_entry))


def _of_type(asked: RestoreArgs, entry: Any) -> RestoreArgs:
    """Restore a leaf as the type that its entry in the returned structure has, unless one is asked for."""
    if asked.restore_type is not None or not _is_entry(entry) or entry.value_type not in _VALUE_TYPES:
        return asked

    return dataclasses.replace(asked, restore_type=entry.value_type)


_VALUE_TYPES: Final = ("jax.Array", "np.ndarray", "scalar")


def _zero(_: Any) -> int:
    return 0


def _shown(handler: BasePyTreeCheckpointHandler, directory: Any) -> tuple[Any, Any]:
    """Return what the caller's function gets of the stored tree: an entry and a `ParamInfo` for each leaf."""
    about, kinds = handler.metadata(directory), handler.kinds(directory)
    use_ocdbt = (directory / file_names.MANIFEST).exists()
    context = get_ts_context(use_ocdbt=use_ocdbt)

    def name(path: Any) -> str:
        return ".".join(str_keypath(path))

    def entry(path: Any, leaf: Any) -> Any:
        return ValueMetadataEntry(kinds[name(path)], skip_deserialize=not _is_metadata(leaf))

    def info(path: Any, leaf: Any) -> Any:
        return ParamInfo(
            name=name(path),
            parent_dir=directory,
            skip_deserialize=not _is_metadata(leaf),
            is_ocdbt_checkpoint=use_ocdbt,
            use_zarr3=about.use_zarr3,
            ts_context=context,
        )

    def is_stored(node: Any) -> bool:
        return _is_metadata(node) or is_empty_node(node)

    entries, infos = (_tree.tree_map_with_path(make, about.tree, is_leaf=is_stored) for make in (entry, info))
    return entries, infos


def _named(
    names: Mapping[str, RestoreArgs], handler: BasePyTreeCheckpointHandler, directory: Any
) -> dict[str, Any]:
    """Restore some leaves of a tree, by their stored names."""
    about = handler.metadata(directory).tree
    keys = {".".join(path): "/".join(path) for path in to_flat_dict(about, is_leaf=_is_metadata)}
    absent = [name for name in names if name not in keys]
    if absent:
        raise SpecError(f"legacy_transform_fn asks for leaves that {directory} does not have: {absent[:10]}")

    needed = {keys[name]: asked for name, asked in names.items()}
    values = _read(needed, about, handler, directory)
    return {name: values[keys[name]] for name in names}


def _is_metadata(node: Any) -> bool:
    return isinstance(node, Metadata)


def _is_entry(node: Any) -> bool:
    return isinstance(node, ValueMetadataEntry)
