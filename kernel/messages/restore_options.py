"""How a restored tree may differ from what is stored, and the report of how it did."""

from __future__ import annotations

__all__ = (
    "Change",
    "ChangeKind",
    "Rename",
    "RestoreOptions",
    "RestoreReport",
    "Transform",
)

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.reports.stage_report import StageReport

Rename: TypeAlias = Mapping[Any, "str | KeyPath | None"] | Callable[[KeyPath], "str | KeyPath | None"]
"""Stored name or key path -> name or key path in the result, None for a leaf that is left out."""

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
        for name in ("value_fn", "multi_value_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise SpecError(f"{name} must be a function, not {getattr(self, name)!r}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How a result may differ from what is stored. Every other difference is an error.

    Raises:
        SpecError: If an option does not fit, or two contradict each other.
    """

    rename: Rename | None = None
    transforms: Mapping[str, Transform] | None = None
    transforms_default_to_original: bool = True
    dtype: Any = None
    strict: bool = True
    on_missing: Literal["raise", "keep"] = "raise"
    on_unexpected: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
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

        _one_of("on_missing", self.on_missing, "raise", "keep")
        _one_of("on_unexpected", self.on_unexpected, "raise", "skip")
        partial = (self.on_missing, self.on_unexpected) != ("raise", "raise")
        if transforms is not None and (rename is not None or partial):
            other = "rename" if rename is not None else "on_missing and on_unexpected"
            raise SpecError(f"transforms and {other} cannot be combined: say it in transforms alone")

    def check_target(self, *, has_like: bool) -> None:
        """Raise `SpecError` if an option was given that needs a target."""
        asked = {
            "transforms": self.transforms is not None,
            "strict=False": not self.strict,
            "on_missing='keep'": self.on_missing == "keep",
            "on_unexpected='skip'": self.on_unexpected == "skip",
            "dtype='like'": isinstance(self.dtype, str) and self.dtype == "like",
        }
        needing = [name for name, given in asked.items() if given]
        if needing and not has_like:
            raise SpecError(f"{', '.join(needing)}: only with a target; pass `like`")


def _one_of(name: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise SpecError(f"{name} is {' or '.join(map(repr, allowed))}, not {value!r}")


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


@final
@dataclass(frozen=True, slots=True)
class RestoreReport(StageReport):
    """What a finished restore did: `n_leaves` were read, of `nbytes` array bytes.

    Attributes:
        changes: Every difference from what is stored; empty without options.
    """

    kind: ClassVar[str] = "restore"

    changes: tuple[Change, ...] = ()

    def key_paths(self, kind: ChangeKind) -> tuple[str, ...]:
        """Return the key paths of all changes of one kind."""
        return tuple(change.key_path for change in self.changes if change.kind == kind)
