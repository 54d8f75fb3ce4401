"""A tree some of whose leaves are not there yet: what `tree_trim(strict=False)` returns."""

from __future__ import annotations

__all__ = ("MISSING", "IncompleteTreeError", "PartsOf")

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Final, Generic, Self, TypeVar, cast, final

from jax import tree_util

from penstock.kernel.errors import SpecError
from penstock.kernel.reports.counted_nouns import counted
from penstock.orbax.v0.common.tree_utils import to_flat_dict

T = TypeVar("T")
Path = tuple[str, ...]

MISSING: Final[EllipsisType] = ...
"""Stands for a leaf that is not there. jax takes it for a leaf, which None is not."""

_tree: Any = tree_util  # jax declares no types for it


@final
class IncompleteTreeError(SpecError):
    """The whole of a tree was asked for, and leaves are missing.

    Attributes:
        missing: Their paths.
    """

    def __init__(self, missing: Sequence[Path]) -> None:
        named = ", ".join("/".join(path) for path in missing[:10])
        leaves = counted(len(missing), "leaf", "leaves")
        super().__init__(f"the tree is not complete: it lacks {leaves}, among them {named}")
        self.missing = tuple(missing)


@final
@_tree.register_pytree_node_class
class PartsOf(Generic[T]):
    """A tree of known structure, with all, some or none of its leaves. It does not change.

    To jax, the leaves that are there are its leaves.

    Args:
        template: A tree of the structure.
        value: What is there of it: a part of such a tree, of any node types. `...` in it stands for a leaf
            that is missing.

    Raises:
        ValueError: If `value` has a leaf where `template` has none.
    """

    def __init__(self, template: T, value: Any) -> None:
        paths = tuple(to_flat_dict(template))
        given: dict[Path, Any] = to_flat_dict(value)
        present = {path: leaf for path, leaf in given.items() if leaf is not MISSING}
        strange = [path for path in present if path not in set(paths)]
        if strange:
            raise SpecError(f"these leaves have no place in the tree: {strange[:10]}; it has {paths[:10]}")

        self._put(_tree.tree_structure(template), paths, present)

    def _put(self, treedef: Any, paths: tuple[Path, ...], present: Mapping[Path, Any]) -> None:
        self._treedef = treedef
        self._paths = paths
        self._present = {path: present[path] for path in paths if path in present}

    @classmethod
    def empty(cls, template: T) -> PartsOf[T]:
        """Make one without any leaf."""
        return cls(template, ())

    @classmethod
    def from_structure(cls, structure: T) -> PartsOf[T]:
        """Make one of a tree, in which `...` stands for what is missing."""
        return cls(structure, structure)

    from_full_structure = from_structure

    @classmethod
    def like(cls, existing: PartsOf[Any], value: Any) -> PartsOf[Any]:
        """Make one of the structure of another."""
        return cls(existing._whole({}), value)

    def is_empty(self) -> bool:
        """Whether no leaf is there."""
        return not self._present

    @property
    def structure_hash(self) -> int:
        """A hash of the structure, and of which leaves are there."""
        return hash((self._treedef, tuple(self._present)))

    @property
    def full_structure(self) -> T:
        """The tree.

        Raises:
            IncompleteTreeError: If a leaf is missing. It is a ValueError.
        """
        missing = [path for path in self._paths if path not in self._present]
        if missing:
            raise IncompleteTreeError(missing)

        return cast("T", self._whole(self._present))

    @property
    def unsafe_structure(self) -> Any:
        """The tree, with `...` for each leaf that is missing."""
        return self._whole(self._present)

    def overlay(self, other: PartsOf[T], *, strict: bool = False, verbose: bool = False) -> PartsOf[T]:
        """Return the leaves of both; those of `other` count where both have one.

        Args:
            other: Of the same structure.
            strict: Whether it is an error if both have a leaf.
            verbose: Has no effect.

        Raises:
            ValueError: If the structures differ, or `strict` is on and both have a leaf.
        """
        del verbose
        self._check(other)
        both = [path for path in self._present if path in other._present]
        if strict and both:
            raise SpecError(f"both trees have these leaves: {both[:10]}")

        return self._with({**self._present, **other._present})

    def intersect(self, other: PartsOf[Any]) -> PartsOf[T]:
        """Return it without the leaves that `other`, of the same structure, does not have."""
        self._check(other)
        return self._with({path: leaf for path, leaf in self._present.items() if path in other._present})

    def __sub__(self, other: PartsOf[Any]) -> PartsOf[T]:
        """Return it without the leaves that `other`, of the same structure, has."""
        self._check(other)
        return self._with({path: leaf for path, leaf in self._present.items() if path not in other._present})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartsOf):
            return False

        parts: Any = other
        return bool(self._treedef == parts._treedef and self._present == parts._present)

    __hash__ = None  # type: ignore[assignment]  # leaves may not be hashable

    def __repr__(self) -> str:
        return f"PartsOf({self.unsafe_structure!r})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Its leaves, for jax."""
        return tuple(self._present.values()), (self._treedef, self._paths, tuple(self._present))

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Sequence[Any]) -> Self:
        """Make one of what `tree_flatten` returned."""
        treedef, paths, present = structure
        made = object.__new__(cls)
        made._put(treedef, paths, dict(zip(present, leaves, strict=True)))
        return made

    def _with(self, present: Mapping[Path, Any]) -> PartsOf[T]:
        made: PartsOf[T] = object.__new__(PartsOf)
        made._put(self._treedef, self._paths, present)
        return made

    def _whole(self, present: Mapping[Path, Any]) -> Any:
        return _tree.tree_unflatten(self._treedef, [present.get(path, MISSING) for path in self._paths])

    def _check(self, other: PartsOf[Any]) -> None:
        if self._treedef != other._treedef:
            raise SpecError(f"the structures differ: {self._treedef} and {other._treedef}")
