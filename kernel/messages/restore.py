"""The messages between the stages of a restore. `penstock.kernel.messages` describes the whole flow."""

from __future__ import annotations

__all__ = (
    "Change",
    "ChangeKind",
    "ComputedLeaf",
    "HostBatch",
    "HostPart",
    "Located",
    "OpaquePiece",
    "PlannedBatch",
    "ReadBatch",
    "Rename",
    "RestoreOptions",
    "RestorePlan",
    "RestoreRequest",
    "RestoredBatch",
    "RestoredTree",
    "Transform",
    "decoded",
)

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, final
from weakref import ReferenceType

from penstock.kernel.errors import CorruptCheckpointError, SpecError
from penstock.kernel.protocols.leaf import KeyPath, LeafPredicate, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import OpaqueChunk, Read, ScatterRead
from penstock.kernel.rules import Rule, Rules

if TYPE_CHECKING:
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.protocols.layouts import StoredCheckpoint
    from penstock.kernel.protocols.leaf_handlers import FilesHandler
    from penstock.kernel.protocols.reads import Read


Rename: TypeAlias = Mapping[Any, "str | KeyPath | None"] | Callable[[KeyPath], "str | KeyPath | None"]
"""Stored name or key path -> name or key path in the result, None for a leaf that is left out."""

Only: TypeAlias = str | Sequence[str] | Callable[[KeyPath], bool]
"""Which leaves are wanted: shell patterns over dotted names, or a function of the stored key path."""

Order: TypeAlias = Sequence[str] | Callable[[KeyPath], Any]
"""Which leaves come first: shell patterns over dotted names, or a function that ranks key paths."""

ChangeKind: TypeAlias = Literal["renamed", "cast", "resized", "skipped", "kept", "computed", "unused"]


@final
@dataclass(frozen=True, slots=True)
class Transform:
    r"""Says where leaves of the result come from; its key in `transforms` says which leaves.

    The key is a regular expression that must match a leaf's whole key path, written with slashes:
    `params/layers/0/kernel`. Key paths in the checkpoint are written in the same way.

    Attributes:
        original_key: The key path in the checkpoint; may refer to groups of the rule's key (`\1`).
            By default the leaf's own.
        use_fallback: Keep the target's value. If the target's value is the default, take the stored one.
        value_fn: Makes the value from the stored one. Called in a worker thread.
        multi_value_fn: Makes the value from several stored ones. Called in a worker thread with the key
            path, the checkpoint's tree of dicts and lists, and what the target has there. Leaves of
            that tree that were not declared are their `LeafSpec`s.
        multi_value_fn_input_args: The leaves that `multi_value_fn` needs: regular expression over
            stored key paths -> what each is restored as (as a leaf of `like`); None for as it was saved.

    Raises:
        SpecError: If these contradict each other.
    """

    original_key: str | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[[str, Any, Any], Any] | None = None
    multi_value_fn_input_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        original = cast("object", self.original_key)  # callers may pass anything
        if original is not None and not isinstance(original, str):
            raise SpecError(f"original_key is a string such as 'params/kernel', not {original!r}")

        if not isinstance(cast("object", self.use_fallback), bool):
            raise SpecError(f"use_fallback is true or false, not {self.use_fallback!r}")

        for name in ("value_fn", "multi_value_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise SpecError(f"{name} must be a function, not {getattr(self, name)!r}")

        needed = cast("object", self.multi_value_fn_input_args)
        if not isinstance(needed, Mapping | None):
            raise SpecError(f"multi_value_fn_input_args is a mapping of patterns, not {needed!r}")

        single = original is not None or self.value_fn is not None
        several = self.multi_value_fn is not None
        if self.use_fallback + single + several > 1:
            raise SpecError(
                "a Transform has original_key and value_fn, or use_fallback, or multi_value_fn, not several"
            )
        if several and self.multi_value_fn_input_args is None:
            raise SpecError("multi_value_fn needs multi_value_fn_input_args: the leaves to be read for it")
        if not several and self.multi_value_fn_input_args is not None:
            raise SpecError("multi_value_fn_input_args needs multi_value_fn, which is not given")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """The options of a restore, as one value. `Checkpointer.restore` describes each of them.

    Without `rules` and those after it, every difference between the result and what is stored is an error.

    Raises:
        SpecError: If an option does not fit, or two contradict each other.
    """

    item: str | None = None
    only: Only | None = None
    split: str | None = None
    mmap: bool = False
    verify: bool | None = None
    prioritise: LeafPredicate | None = None
    max_expansion: int | None = None
    replica_axis: str | None = None
    primary_replica: int = 0
    rules: Sequence[Rule] | None = None
    rename: Rename | None = None
    transforms: Mapping[str, Transform] | None = None
    transforms_default_to_original: bool = True
    dtype: Any = None
    strict: bool = True
    on_missing: Literal["raise", "keep"] = "raise"
    on_unexpected: Literal["raise", "skip"] = "raise"

    @property
    def makes_leaves(self) -> bool:
        """True if leaves of the result may be computed, or be the target's own."""
        return self.transforms is not None or self.on_missing == "keep"

    def __post_init__(self) -> None:
        if self.rules is not None:
            object.__setattr__(self, "rules", Rules.of(self.rules))

        rename = cast("object", self.rename)
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise SpecError(f"rename must be a mapping or a function, not {rename!r}")

        transforms = cast("object", self.transforms)
        if transforms is not None:
            if not isinstance(transforms, Mapping):
                raise SpecError(f"transforms must be a mapping, not {transforms!r}")
            for key, rule in cast("Mapping[object, object]", transforms).items():
                if not isinstance(key, str) or not isinstance(rule, Transform):
                    raise SpecError(f"transforms maps texts to penstock.Transform, not {key!r} to {rule!r}")

        for name, value, other in (
            ("on_missing", self.on_missing, "keep"),
            ("on_unexpected", self.on_unexpected, "skip"),
        ):
            if value not in ("raise", other):
                raise SpecError(f"{name} is 'raise' or {other!r}, not {value!r}")

        partial = (self.on_missing, self.on_unexpected) != ("raise", "raise")
        if transforms is not None and (rename is not None or partial):
            other = "rename" if rename is not None else "on_missing and on_unexpected"
            raise SpecError(f"transforms and {other} cannot be combined: say it in transforms alone")

    def check_no_target(self) -> None:
        """Raise `SpecError` if an option was given that needs a target, for a restore without one."""
        asked = {
            "transforms": self.transforms is not None,
            "strict=False": not self.strict,
            "on_missing='keep'": self.on_missing == "keep",
            "on_unexpected='skip'": self.on_unexpected == "skip",
            "dtype='like'": isinstance(self.dtype, str) and self.dtype == "like",
        }
        needing = [name for name, given in asked.items() if given]
        if needing:
            raise SpecError(f"{', '.join(needing)}: only with a target; pass `like`")


@final
@dataclass(frozen=True, slots=True)
class Change:
    """One requested difference between a result and what is stored."""

    kind: ChangeKind
    key_path: str  #: in the result; of a skipped leaf, in the checkpoint; of an unused rule, its key
    stored: str = ""  #: what the checkpoint has: a key path, a dtype, a shape
    result: str = ""  #: what became of it

    def __str__(self) -> str:
        text = f"{self.kind:<9} {self.key_path}"
        if self.stored and self.result:
            return f"{text}: {self.stored} -> {self.result}"

        return f"{text}: {self.stored or self.result}" if self.stored or self.result else text


_AS_STORED: Final = RestoreOptions()


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The first message of a restore."""

    path: str
    like: object = None
    has_like: bool = False  #: whether `like` counts; None is a tree, too
    options: RestoreOptions = _AS_STORED


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint whose documents have been read, and what to restore from it. No array byte is read yet."""

    checkpoint: StoredCheckpoint
    request: RestoreRequest


@dataclass(frozen=True, slots=True)
class ComputedLeaf:
    """A leaf of the result that is computed from values that were read for it."""

    index: int  #: of the leaf, in the result
    inputs: tuple[int, ...]  #: indices of the values; none of them is an index of the result
    make: Callable[[Sequence[Any]], object]
    """Blocking; takes the inputs in order. Returns a `TreeDifference` if what it made does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """The planning stage's decisions about the whole result. Every later batch refers to them.

    A stage that creates batches passes on the `plan` of the batch it took. The last stages learn from it
    which values must arrive and what tree they form.
    """

    infos: Sequence[ParamInfo]  #: one for each leaf of the result, in flatten order
    unflatten: Callable[[Sequence[object]], object]  #: makes the tree of one value per info, in order
    directory: str = ""  #: what holds the stored tree: the checkpoint, or an item in it
    kept: Sequence[tuple[int, object]] = ()  #: (index, value) of leaves that keep the target's value
    computed: Sequence[ComputedLeaf] = ()  #: leaves that functions make
    changes: tuple[Change, ...] = ()  #: how the result departs from what is stored, as it was asked for
    read_alone: Sequence[int] = ()  #: indices of the leaves that share no buffer, as small ones do


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Leaves of a restore that travel together before they are read."""

    leaves: Sequence[ReadLeaf]  #: mostly in columns: `ReadLeaves`
    prioritised: bool = False
    plan: RestorePlan | None = field(default=None, compare=False, repr=False)
    handler: FilesHandler | None = None  #: if these are all leaves of a handler with files of its own


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Reads that may be performed now, with the leases on their bytes.

    A stage that drops a batch instead of passing it on releases it.
    """

    leaves: Sequence[ReadLeaf]  #: those that the reads belong to; a large leaf comes with each of its reads
    reads: tuple[Read, ...]
    staged: ByteLease | None = None  #: on the staging bytes of the leaves; with the first of their reads
    in_flight: ByteLease | None = None
    scratch: ByteLease | None = None  #: on buffers that die once they are read
    handler: FilesHandler | None = None  #: reads all of these leaves itself, from files of its own
    plan: RestorePlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum([read.nbytes for read in self.reads])

    def release(self) -> None:
        """Give back every lease. Never blocks; may be called again."""
        if self.staged is not None:
            self.staged.release()

        self.release_read()

    def release_read(self) -> None:
        """Give back the leases that end when the reads have been performed."""
        for lease in (self.in_flight, self.scratch):
            if lease is not None:
                lease.release()


@dataclass(frozen=True, slots=True)
class HostPart:
    """One rectangular part of a stored array, on the host."""

    info: ParamInfo  #: where the leaf stands
    spec: LeafSpec  #: of the leaf as it is stored
    bounds: tuple[tuple[int, int], ...]  #: (start, stop) of the part along each axis of the whole array
    data: memoryview
    """Its elements as bytes, in C order. A stage may write other bytes of the same length into it; it is
    read-only only where the file itself is the memory, under `mmap`."""

    @property
    def key_path(self) -> str:
        """The leaf's key path, for messages."""
        return self.info.key_path


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Leaves whose bytes are all on the host."""

    leaves: Sequence[ReadLeaf]  #: to be passed on as they came, for some of them share a buffer
    ready: tuple[tuple[int, object], ...] = ()  #: (leaf index, value), read by a handler itself
    staged: ByteLease | None = None  #: on the bytes that are freed once the values are built
    plan: RestorePlan | None = None

    def release(self) -> None:
        """Give back the lease. Never blocks; may be called again."""
        if self.staged is not None:
            self.staged.release()

    def parts(self) -> Iterator[HostPart]:
        """Yield all bytes that were read, leaf by leaf. Blocking.

        Leaves without array bytes, and those of `ready`, have none.
        """
        for leaf in self.leaves:
            for region in leaf.target.regions:
                yield HostPart(leaf.info, leaf.stored.spec, region.bounds, region.view())


@dataclass(frozen=True, slots=True)
class RestoredBatch:
    """Finished values, by leaf index."""

    values: Sequence[tuple[int, object]]
    plan: RestorePlan | None = None


@dataclass(frozen=True, slots=True)
class RestoredTree:
    """The last message of a restore."""

    tree: object  #: None where the values were handed over one by one
    plan: RestorePlan | None = None
    references: Mapping[str, ReferenceType[Any]] = field(default_factory=dict["str", "ReferenceType[Any]"])
    """Immutable values that equal what is stored, by stored name."""


@dataclass(frozen=True, slots=True)
class OpaquePiece:
    """A whole stored chunk, with the attribute names of a save's `Piece`."""

    name: str  #: stored name of the leaf
    key_path: str
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    data: memoryview  #: bytes; not valid after the function has returned


def decoded(batch: PlannedBatch, codec: str, function: Callable[[OpaquePiece], Any]) -> PlannedBatch:
    """Return a batch in which leaves with this codec are read through `function`.

    Checksums are compared first, on the stored bytes. Nothing is called yet.

    Args:
        batch: Of a restore, after `plan`.
        codec: The name that the stage of the save gave it, as in the leaf's spec.
        function: Returns the chunk's original bytes, as any contiguous buffer. Called in worker
            threads, several at once. Its errors become a `CorruptCheckpointError` that names the leaf.
    """
    if not any(map(_is_opaque, ReadLeaves.of(batch.leaves).reads)):
        return batch

    leaves = [
        replace(leaf, reads=tuple([_through(read, codec, function) for read in leaf.reads]))
        if any(map(_is_opaque, leaf.reads))
        else leaf
        for leaf in batch.leaves
    ]
    return replace(batch, leaves=ReadLeaves.of(leaves))


def _is_opaque(read: Read) -> bool:
    return isinstance(read, ScatterRead) and read.opaque is not None


def _through(read: Read, codec: str, function: Callable[[OpaquePiece], Any]) -> Read:
    if not isinstance(read, ScatterRead) or read.opaque is None or read.opaque.codec != codec:
        return read

    decode = partial(_decode, function, read.file, read.opaque, read.scatter)
    return replace(read, scatter=decode, opaque=None)


def _decode(
    function: Callable[[OpaquePiece], Any],
    file: str,
    about: OpaqueChunk,
    scatter: Callable[[memoryview], None],
    data: memoryview,
) -> None:
    piece = OpaquePiece(about.name, about.key_path, about.chunk, about.start, data)
    try:
        plain = memoryview(function(piece)).cast("B")
    except Exception as error:
        problem = f"codec {about.codec!r} could not be undone for chunk {about.chunk}: {error!r}"
        question = "is the key the right one?"
        raise CorruptCheckpointError(file, f"{problem}; {question}", key_path=about.key_path) from error

    scatter(plain)
