"""Conversion from one format to another, piece by piece: nothing is restored, no device is touched."""

from __future__ import annotations

__all__ = ("Format", "convert")

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

from penstock.checkpointer.checkpointer import Path
from penstock.config.config import Config
from penstock.handlers.formats.npz_archive import SUFFIX as NPZ_SUFFIX
from penstock.handlers.formats.npz_archive import is_npz
from penstock.handlers.formats.orbax.discovery import read_root_metadata
from penstock.handlers.formats.orbax.file_names import MARKS
from penstock.handlers.formats.safetensors.pretrained_layout import PretrainedLayout, in_natural_order
from penstock.handlers.formats.safetensors.safetensors_checkpoint import StoredTensor
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.handlers.formats.safetensors.tensor_paths import SUFFIX
from penstock.handlers.formats.untrusted import parse_object
from penstock.handlers.layouts.discovery import finished_steps
from penstock.handlers.layouts.item_parts import Parts
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue
from penstock.handlers.stores.publishing.paths import path_or_url, path_to_save_to, scheme_of
from penstock.handlers.stores.publishing.reading import Reading, Snapshots, read_unchanged, reading
from penstock.inspection.file_sizes import files_below
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import DestinationExistsError, PathError, SpecError
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.restore import Rename
from penstock.kernel.options import parse_bytes
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.pipeline.run_context import ShowProgress
from penstock.kernel.pipeline.statistics import combined
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.kernel.rules import MADE_BY, Rule, Rules
from penstock.reports.kept_reports import copy_reports
from penstock.reports.report import SaveReport
from penstock.rewriting.leaf_changes import LeafChanges
from penstock.rewriting.rewriting import Rewriting, budget, check_apart, job_of
from penstock.rewriting.stored_items import ItemsReader, StoredItems, stored_value
from penstock.stages.resume import Resume, why_not_resumed
from penstock.stages.rules.derived import Derivation, DerivedCheckpoint
from penstock.steps.step_directory import METRICS, write_root_metadata
from penstock.stores.store_finder import StoreFinder
from penstock.tools.carried_files import carried_files
from penstock.tools.npz_writing import NpzWriting, plan_comment, plan_members
from penstock.tools.remaking import recorded_digests

Format: TypeAlias = Literal["orbax", "safetensors", "huggingface", "npz"]
_SUFFIXES: Final[dict[Format, str]] = {"safetensors": SUFFIX, "npz": NPZ_SUFFIX}


@short_traceback
async def convert(
    source: Path,
    destination: Path,
    *,
    format: Format | None = None,  # noqa: A002  # what everybody calls it
    split: str | None = ".",
    item: str | None = None,
    max_shard_bytes: int | str | None = None,
    rules: Sequence[Rule] | None = None,
    rename: Rename | None = None,
    dtype: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    max_expansion: int = MOST_EXPANSION,
    save_format: SaveFormat | None = None,
    progress: ShowProgress = False,
    config: Config | Path | None = None,
    store: Store | None = None,
    coordinator: Coordinator | None = None,
    memory_limit: int | str | None = None,
    save_device_host_concurrent_bytes: int | str | None = None,
    save_concurrent_bytes: int | str | None = None,
    restore_concurrent_bytes: int | str | None = None,
    memory: MemoryRegulator | None = None,
) -> SaveReport:
    """Write all that is saved at `source` to `destination`, in the same or another format.

    Leaves go piece by piece. Recorded checksums are compared. Of a directory of steps, every step goes, and
    what was recorded of its saves.

    Args:
        source: Anything that can be restored, a directory of steps, or an npz file.
        destination: Where it goes.
        format: `"orbax"`, `"safetensors"`, `"huggingface"` or `"npz"`; by default what the name of
            `destination` says. `"huggingface"` is a folder as `save_pretrained` of transformers writes it,
            byte for byte. Files of a model that are no arrays, such as `config.json`, go along from folder
            to folder.
        split: Of a safetensors or npz source: what separates the keys in its names; None: one flat dict.
        item: Convert only this item of the source, as a tree; by default all that it holds.
        max_shard_bytes: As for `export_safetensors`; a number, or a text such as `"5GB"`. For `"huggingface"`
            50 GB by default, as there.
        rules: What becomes of the leaves of each tree: rules of `penstock.rules`, or what `load_rules`
            returns. A leaf that no rule takes is an error, unless the rules have `rest="keep"`.
        rename: Other names for leaves, as for `Checkpointer.restore`; None leaves one out. Each tree of the
            source gets them, and each rule must name a leaf of one.
        dtype: What arrays are cast to, as for `Checkpointer.restore`: a dtype for all of its kind, or a
            mapping from patterns of names, after renaming, to dtypes. Values are cast as in C.
        overwrite: Replace what is at `destination`, atomically, if it is of the format written.
        resume: Go on with the same conversion, if it was interrupted: what it wrote is compared with its
            checksums and kept. It is begun anew if the source or an option has changed. A conversion that was
            killed can always be gone on with. With `resume` one that fails or is cancelled can be, too. On a
            file system, of one checkpoint, by one process, in any format but npz, with any codec but
            `"auto"`; anything else is refused before anything is read.
        custom_metadata: Added to that of the source.
        max_expansion: How many times the bytes stored the arrays may take: what was never written of an
            array is written out.
        save_format: How arrays are stored in Orbax's layout, whatever the format of the source was; by
            default in one OCDBT database, without a codec.
        progress: As for `Checkpointer.save`: a bar, or a function of the bytes done and all bytes. Of a
            directory of steps, each step begins anew.
        config: As for `Checkpointer`, and so are all that follow.
        store: Where both are; by default each where its path says, on a disk or in a bucket.
        coordinator: How the processes of a job agree; by default by the service of `jax.distributed`. They
            divide the work: each reads what it writes. They convert one checkpoint, not to npz.
        memory_limit: Host bytes that may be held.
        save_device_host_concurrent_bytes: Of these, how many may be staged.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Bytes that may be on their way from storage at once.
        memory: The budget of a Checkpointer, to share it.

    Raises:
        SpecError: If the destination cannot hold all of the source; the message names what. If `rename` or
            `dtype` does not fit, or names no leaf.
        RulesError: If the rules and the source do not fit; it lists every problem.
        ExpansionError: If the source claims far more bytes than it stores.
        ReplacedError: If the source was replaced again and again while it was read.
        PenstockError: If the source is damaged, or the medium refuses.

    Cancellation:
        No part of a checkpoint is left, unless with `resume`: then what was done stays, hidden. Steps that
        were converted before stay.
    """
    limits = (
        memory_limit,
        save_device_host_concurrent_bytes,
        save_concurrent_bytes,
        restore_concurrent_bytes,
    )
    options, regulator = budget(config, limits, memory)
    options, job = job_of(options, coordinator)
    stores, start = StoreFinder(store, options.store), path_or_url(source)
    final = path_to_save_to(destination)
    rewriting = Rewriting(
        store=stores.at(final),
        config=options,
        memory=regulator,
        coordinator=job,
        overwrite=overwrite,
        save_format=save_format,
        source=stores.at(start),
        progress=progress,
    )
    target = _Target.of(format, final, max_shard_bytes)
    if target.format != "orbax" and save_format is not None:
        raise SpecError(f"save_format is for Orbax's layout, and the destination is {target.format}")

    if target.format == "npz" and len(job.processes) > 1:
        raise SpecError("an npz file is written by one process: convert in one, without a coordinator")

    if resume:
        problem = _why_not_resumed(rewriting, target, rename)
        if problem is not None:
            raise SpecError(f"{final}: {problem}, so that nothing can go on with it")

    chosen = None if rules is None else Rules.of(rules)
    reading = _Reading(split, item, max_expansion, chosen, rename, dtype)
    reading.changes()  # which raises for what fits no source
    return await _Conversion(rewriting, Threads(), target, reading, custom_metadata, resume).run(start)


def _why_not_resumed(rewriting: Rewriting, target: _Target, rename: Rename | None) -> str | None:
    """Say why a conversion cannot be gone on with, if that is known before anything is read."""
    if callable(rename):
        return "rename is a function, not a mapping, which could be compared with that of the one before"
    if target.format == "npz":
        return "an npz file is written in one go"

    form = rewriting.save_format
    codecs = () if form is None else (form.leaf_codec,)
    return why_not_resumed(rewriting.store, len(rewriting.coordinator.processes), codecs)


@final
@dataclass(frozen=True, slots=True)
class _Target:
    """The destination of a conversion, and its format."""

    path: str
    format: Format
    tensors: SafetensorsLayout | PretrainedLayout | None = None  #: set if they are written

    @classmethod
    def of(cls, written: Format | None, destination: str, max_shard_bytes: int | str | None) -> _Target:
        ends: list[Format] = [name for name, end in _SUFFIXES.items() if destination.endswith(end)]
        named = ends[0] if ends else None
        if written is not None and written not in get_args(Format):
            known = ", ".join(map(repr, get_args(Format)))
            raise SpecError(f"there is no format {written!r}; use one of {known}")
        chosen: Format = written or named or "orbax"
        most = _size_of(max_shard_bytes)
        if chosen not in ("safetensors", "huggingface") and most is not None:
            raise SpecError("max_shard_bytes is for safetensors; pass format='safetensors' or 'huggingface'")
        if chosen == "huggingface" and named == "safetensors":
            problem = "is the name of one file, and transformers' are in a folder; name one"
            raise PathError(destination, problem)
        if named not in (None, chosen):
            kind = "an npz" if named == "npz" else f"a {named}"
            problem = f"is the name of {kind} file, but the requested format is {chosen!r}"
            raise PathError(destination, problem)
        if chosen == "npz" and named is None:
            raise PathError(destination, "is no name of an npz file; it must end in .npz")

        tensors: SafetensorsLayout | PretrainedLayout | None = None
        if chosen == "safetensors":
            tensors = SafetensorsLayout(most)
        elif chosen == "huggingface":
            tensors = PretrainedLayout(most)

        return cls(destination, chosen, tensors)

    @property
    def kind(self) -> str:
        """Its kind, in a sentence."""
        if self.format == "huggingface":
            return "a folder of transformers"

        return "an npz file" if self.format == "npz" else self.format

    @property
    def holds(self) -> str:
        """The beginning of a sentence about what fits into it."""
        return f"{self.kind} {'hold' if self.format == 'safetensors' else 'holds'}"

    @property
    def is_folder(self) -> bool:
        """True if files can be next to its arrays."""
        return not self.path.endswith(tuple(_SUFFIXES.values()))

    def fit(self, path: str, items: StoredItems) -> StoredItems:
        """Return the items as the format holds them.

        Raises:
            SpecError: If it cannot hold them all; the message names those.
        """
        if self.format == "orbax":
            return items
        if items.tree_custom_metadata is not None:
            problem = f"{self.kind} cannot carry the metadata that is stored with the tree"
            raise SpecError(f"{path}: {problem}, {items.tree_custom_metadata!r}")
        if items.parts is None:
            return items

        names = list(items.parts.handlers)
        trees = [part for part in items.parts.tree_parts if len(part.keys) == 1]
        metrics = _metrics_of(items.parts)
        if len(trees) == 1 and len(names) == (1 if metrics is None else 2):
            tree = cast("dict[str, object]", items.tree)[trees[0].keys[0]]
            custom = (
                items.custom_metadata if metrics is None else {**metrics, **(items.custom_metadata or {})}
            )
            inner = replace(items, tree=tree, parts=None, custom_metadata=custom)
            return self.fit(path, replace(inner, tree_custom_metadata=trees[0].custom_metadata))

        hint = f"; convert one of them, as in item={trees[0].keys[0]!r}" if trees else ""
        listed = ", ".join(map(repr, names))
        raise SpecError(f"{path}: {self.holds} one tree, and cannot carry all of the items {listed}{hint}")


def _metrics_of(parts: Parts) -> Mapping[str, Any] | None:
    """Return the metrics of a manager's step as metadata, their only place next to one tree; None if none."""
    for document in parts.documents:
        if document.path.startswith(f"{METRICS}/"):
            return {METRICS: parse_object(document.path, document.data)}

    return None


@final
@dataclass(frozen=True, slots=True)
class _Reading:
    """The part of the source that is converted, and the way it is read."""

    split: str | None
    item: str | None
    max_expansion: int
    rules: Rules | None
    rename: Rename | None
    dtype: Any

    def changes(self) -> LeafChanges | None:
        """Return the changes of the leaves of one checkpoint; None if there are none."""
        return None if self.rename is None and self.dtype is None else LeafChanges(self.rename, self.dtype)


@final
@dataclass(frozen=True, slots=True)
class _Conversion:
    """One conversion, of one checkpoint or of all steps in a directory."""

    rewriting: Rewriting
    threads: Threads
    target: _Target
    reading: _Reading
    custom_metadata: Mapping[str, Any] | None
    resumes: bool

    async def run(self, start: str) -> SaveReport:
        final, store = self.target.path, self.rewriting.store
        check_apart(start, final)
        steps = await self.threads.run(_stored_steps, self.rewriting.origin, start)
        if steps is None:
            return await self._convert(start, final)
        if self.target.format != "orbax":
            return await self._convert(_only_step(start, steps, self.target), final)
        latest = os.path.join(start, steps.names[-1])
        if self.resumes:
            raise SpecError(f"{start}: only one step can be resumed; convert each by itself, as {latest}")
        if self.is_joint:
            problem = "several processes convert one step together; convert each by itself"
            raise SpecError(f"{start}: {problem}, as {latest}")

        await self.threads.run(_check_root, store, start, final, self.rewriting.overwrite)
        reports = [
            await self._convert(os.path.join(start, name), os.path.join(final, name)) for name in steps.names
        ]
        if steps.root_metadata is not None:
            await self.threads.run(write_root_metadata, store, final, steps.root_metadata)

        await self.threads.run(copy_reports, self.rewriting.origin, start, store, final)
        return _together(final, reports)

    @property
    def is_joint(self) -> bool:
        """True if several processes divide the work."""
        return len(self.rewriting.coordinator.processes) > 1

    async def _convert(self, start: str, final: str) -> SaveReport:
        store, threads = self.rewriting.origin, self.threads
        if self.is_joint:  # one that tried again alone would wait for the others in vain
            async with reading(store, threads, start, views=Snapshots()) as source:
                return await self._convert_once(start, final, source)

        convert = partial(self._convert_once, start, final)
        return await read_unchanged(store, threads, start, convert, views=Snapshots())

    async def _convert_once(self, start: str, final: str, source: Reading) -> SaveReport:
        store, threads = self.rewriting.origin, self.threads
        spills = None if scheme_of(final) is not None else os.path.dirname(final)
        async with self.rewriting.source_files(threads, spills) as files:
            asked = self.reading
            take = partial(_whole, files)
            changes = asked.changes()
            reader = ItemsReader(
                store,
                take,
                asked.split,
                max_expansion=asked.max_expansion,
                rules=asked.rules,
                changes=changes,
            )
            read = await threads.run(reader.read, start, asked.item)
            if changes is not None:
                changes.check_used(start)

            items = self._recorded(start, self.target.fit(start, read))
            if self.target.format == "npz":
                return await self._write_npz(source, final, items)

            beside = await threads.run(carried_files, store, start) if self.target.is_folder else []
            layout = self.target.tensors
            if layout is not None:
                layout = replace(layout, beside=[document.path for document in beside])
            if isinstance(layout, PretrainedLayout):
                layout = replace(layout, order=_order_of(items.tree, asked.rules))

            resume = Resume(partial(self._key, start), self.resumes)
            return await self.rewriting.save(
                source, final, items, layout, self.custom_metadata, beside, resume
            )

    def _recorded(self, start: str, items: StoredItems) -> StoredItems:
        """Return the items with a record of how each leaf is made.

        A folder as transformers writes it has none: it is that byte for byte.
        """
        rules, custom = self.reading.rules, items.custom_metadata
        if self.target.format == "huggingface":
            custom = {name: value for name, value in (custom or {}).items() if name != MADE_BY}
        elif rules is not None:
            custom = _made_by(start, self.reading, rules, _named_leaves(items.tree, ()), custom)

        return replace(items, custom_metadata=custom)

    def _key(self, start: str) -> str:
        """Return all that decides the result, which tells this conversion from others to the same place."""
        asked, target = self.reading, self.target
        if callable(asked.rename):  # of which nothing is the same in two processes but where it is from
            asked = replace(asked, rename={"": f"{asked.rename.__module__}.{asked.rename.__qualname__}"})

        most = None if target.tensors is None else target.tensors.max_shard_bytes
        options = (target.format, most, self.rewriting.save_format, self.custom_metadata)
        source = files_below(self.rewriting.origin, start)
        return repr((start, source, options, asked))

    async def _write_npz(self, source: Reading, final: str, items: StoredItems) -> SaveReport:
        rewriting, threads = self.rewriting, self.threads
        comment = plan_comment({**(items.custom_metadata or {}), **(self.custom_metadata or {})})
        members = await threads.run(plan_members, items.tree)
        piece_bytes = min(rewriting.config.save.piece_bytes, max(rewriting.memory.limit // 4, 1))
        writing = NpzWriting(
            rewriting.store,
            threads,
            rewriting.memory,
            piece_bytes,
            bool(rewriting.overwrite),
            rewriting.progress,
        )
        return await writing.save(final, members, comment, source.end)


def _size_of(given: int | str | None) -> int | None:
    try:
        return parse_bytes(given) if isinstance(given, str) else given
    except ValueError as error:
        raise SpecError(f"max_shard_bytes: {error}") from error


def _order_of(tree: object, rules: Rules | None) -> list[str]:
    """Return the names of leaves in the order in which they are dealt to files.

    It is that of the rules that make them, or that of the files of the source. Within a file, and of any
    other source, it is that of their names.
    """
    if rules is not None:
        return rules.in_order([name for name, _ in _named_leaves(tree, ())])

    files: dict[str, str] = {}
    for name, value in _named_leaves(tree, ()):
        detail = value.stored.detail if isinstance(value, StoredValue) else None
        files[name] = detail.file if isinstance(detail, StoredTensor) else ""

    return sorted(in_natural_order(files), key=files.__getitem__)


def _named_leaves(tree: object, keys: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        members: Iterable[tuple[object, object]] = cast("dict[object, object]", tree).items()
    elif isinstance(tree, list | tuple):
        members = enumerate(cast("Sequence[object]", tree))
    else:
        yield ".".join(keys), tree
        return

    for key, member in members:
        yield from _named_leaves(member, (*keys, str(key)))


def _made_by(
    source: str,
    asked: _Reading,
    rules: Rules,
    leaves: Iterable[tuple[str, object]],
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the custom metadata of what rules make: that of the source, and how each leaf was made.

    Args:
        source: Path of the source.
        asked: The part of it that is read.
        rules: Those that were carried out.
        leaves: Of the result, each with its dotted name. What is stored so in the source is left out.
        before: The custom metadata of the source. What was recorded there of earlier rules is kept.
    """
    made: dict[str, Any] = {}
    digests: dict[int, Mapping[str, str | None]] = {}  # of each tree
    for name, value in leaves:
        if not isinstance(value, StoredValue) or not isinstance(value.checkpoint, DerivedCheckpoint):
            continue

        about, stored = value.stored.detail, value.checkpoint.source
        if isinstance(about, Derivation):
            if id(stored) not in digests:
                digests[id(stored)] = recorded_digests(stored, [leaf.info.name for leaf in stored.leaves])

            known_now = digests[id(stored)]
            made[name] = {
                "of": {one: known_now[one] for one in about.sources},
                "rules": [number + 1 for number in about.rules],
            }
            if asked.rename is not None and value.stored.info.name != name:
                made[name]["was"] = value.stored.info.name

    known = dict(before or {})
    record: dict[str, Any] = {"source": source, "rules": [rule.table() for rule in rules], "leaves": made}
    if asked.split != ".":
        record["split"] = asked.split
    if asked.item is not None:
        record["item"] = asked.item
    if MADE_BY in known:
        record["before"] = known[MADE_BY]

    return {**known, MADE_BY: record}


def _whole(files: SourceFiles, place: str, opened: StoredCheckpoint, leaf: StoredLeaf) -> object:
    return stored_value(files, opened, leaf)


def _only_step(root: str, steps: _StoredSteps, target: _Target) -> str:
    """Return the path of the one step of a directory.

    Raises:
        SpecError: If there is more than one file or folder holds.
    """
    if len(steps.names) > 1:
        latest = os.path.join(root, steps.names[-1])
        problem = f"{target.holds} one step, and cannot carry all of the steps {', '.join(steps.names)}"
        raise SpecError(f"{root}: {problem}; convert one of them, as in {latest}")
    if steps.root_metadata is not None:
        raise SpecError(f"{root}: {target.kind} cannot carry the metadata of a directory of steps")

    return os.path.join(root, steps.names[0])


@final
@dataclass(frozen=True, slots=True)
class _StoredSteps:
    """The contents of a directory of steps."""

    names: Sequence[str]  #: of the finished steps, ascending; at least one
    root_metadata: Mapping[str, Any] | None


def _stored_steps(store: Store, path: str) -> _StoredSteps | None:
    names = None if is_npz(store, path) else finished_steps(store, path)
    return None if names is None else _StoredSteps(names, read_root_metadata(store, path))


def _check_root(store: Store, start: str, final: str, overwrite: bool) -> None:
    """Raise unless steps may be written into the directory `final`."""
    if store.kind(final) is None:
        return
    if store.kind(final) == "file" or not MARKS.isdisjoint(store.list_directory(final)):
        raise PathError(final, "is no directory of steps, and the source is one")
    if not overwrite and store.list_directory(final):
        raise DestinationExistsError(final)


def _together(path: str, reports: Sequence[SaveReport]) -> SaveReport:
    return SaveReport(
        path,
        n_leaves=sum(report.n_leaves for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        staged_s=sum(report.staged_s for report in reports),
        durable_s=sum(report.durable_s for report in reports),
        peak_leased_bytes=max(report.peak_leased_bytes for report in reports),
        stages=combined(stage for report in reports for stage in report.stages),
    )
