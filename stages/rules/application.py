"""Rules applied to the documents of a stored checkpoint: which array each leaf of the result is.

A rule takes leaves by their names and says what becomes of their arrays. Nothing is read. All that does not
fit is found before the first byte is written, and one error lists it.
"""

from __future__ import annotations

__all__ = ("derive",)

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast, final

import jax
import numpy as np

from penstock.kernel.errors import RulesError, SpecError
from penstock.kernel.protocols.layouts import NamedTensors, StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.rules import (
    Bindings,
    Cast,
    Concat,
    Constant,
    Dequantize,
    Drop,
    Pad,
    Pattern,
    Rename,
    Repeat,
    Reshape,
    Rule,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from penstock.stages.planning.casting import kind_of, why_not_cast
from penstock.stages.planning.key_patterns import near_leaves
from penstock.stages.planning.renaming import leaves_within_leaves, renamed_info
from penstock.stages.rules import arrays
from penstock.stages.rules.arrays import Array, NdArray, UnfitError
from penstock.stages.rules.derived import Derivation, DerivedCheckpoint

_MOST_LISTED: Final = 20


def derive(rules: Rules, checkpoint: StoredCheckpoint, *, has_target: bool = False) -> DerivedCheckpoint:
    """Apply rules to a stored checkpoint. Reads no array bytes.

    Args:
        rules: In order.
        checkpoint: The source.
        has_target: Whether a target says which leaves are wanted; then one that no rule takes is no error.

    Raises:
        RulesError: If something that a rule names is not there, if no rule takes a leaf, or if a leaf is not
            what a rule needs. It lists all of them.
    """
    state = _State(checkpoint)
    for number, rule in enumerate(rules):
        state.apply(number, rule)

    return state.finish(rules, has_target=has_target)


@final
@dataclass(frozen=True, slots=True)
class _Made:
    """A leaf between two rules."""

    info: ParamInfo  #: of the stored leaf that it was, or of the first that it is made of
    spec: LeafSpec  #: of that one
    about: Derivation
    is_taken: bool = False


@final
class _State:
    """The leaves between two rules, by name, and the problems so far."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._problems: list[str] = []
        self._leaves: dict[str, _Made] = {}
        self._number, self._rule = 0, ""
        for number, leaf in enumerate(checkpoint.leaves):
            about = Derivation((leaf.info.name,), number=number, array=_stored(number, leaf.spec))
            self._leaves[leaf.info.name] = _Made(leaf.info, leaf.spec, about)

        self._typestr = next(
            (made.spec.typestr for made in self._leaves.values() if len(made.spec.shape or ())), "np.ndarray"
        )

    def apply(self, number: int, rule: Rule) -> None:
        self._number, self._rule = number, f"rule {number + 1}, {rule}"
        match rule:
            case Drop():
                self._replace({name: [] for name, _ in self._found(rule, rule.sources[0])})
            case Rename():
                self._each(rule, _as_it_is)
            case Cast():
                self._each(rule, partial(_cast, rule), passes_over=partial(_passes_over, rule))
            case Transpose():
                self._each(rule, partial(_transposed, rule), passes_over=_is_no_array)
            case Reshape():
                self._each(rule, partial(_reshaped, rule), passes_over=_is_no_array)
            case Select():
                self._each(rule, partial(_selected, rule), passes_over=_is_no_array)
            case Pad():
                self._each(rule, partial(_padded, rule), passes_over=_is_no_array)
            case Repeat():
                self._each(rule, partial(_repeated, rule), passes_over=_is_no_array)
            case Split():
                self._parts(rule, partial(_split, rule))
            case Unstack():
                self._parts(rule, partial(_unstacked, rule))
            case Concat():
                self._joined(rule, partial(_concatenated, rule))
            case Stack():
                self._joined(rule, partial(_stacked, rule))
            case Dequantize():
                self._dequantize(rule)
            case Constant():
                self._constant(rule)
            case _:
                raise SpecError(f"{type(rule).__name__} is no rule of penstock.rules")

    def finish(self, rules: Rules, *, has_target: bool) -> DerivedCheckpoint:
        """Return the leaves that are left as a checkpoint."""
        if rules.rest == "error" and not has_target:
            rest = [
                name
                for name, made in self._leaves.items()
                if not made.is_taken and not made.spec.is_empty_marker
            ]
            for name in rest[:_MOST_LISTED]:
                self._problems.append(f"no rule takes {name!r}")
            if len(rest) > _MOST_LISTED:
                self._problems.append(f"no rule takes {len(rest) - _MOST_LISTED:,} more")
            if rest:
                self._problems.append("leaves that no rule takes keep their names with rest = 'keep'")

        leaves = [self._leaf(name, made) for name, made in self._leaves.items()]
        for difference in leaves_within_leaves([leaf.info for leaf in leaves]):
            self._problems.append(f"{difference.key_path}: {difference.in_like}")
        if self._problems:
            raise RulesError(self._checkpoint.path, self._problems)

        places = [made.about.number for made in self._leaves.values()]
        return DerivedCheckpoint(self._checkpoint, tuple(leaves), tuple(places))

    def _leaf(self, name: str, made: _Made) -> StoredLeaf:
        about = made.about
        if about.number is not None and name == made.info.name:
            return self._checkpoint.leaves[about.number]

        keys = (name,) if self._is_flat else tuple(name.split("."))
        info = made.info if name == made.info.name else renamed_info(made.info, keys)
        if about.number is not None or about.array is None:
            return StoredLeaf(info, made.spec, about)

        shape, dtype = about.array.shape, about.array.dtype
        spec = LeafSpec(
            "np.ndarray" if made.spec.typestr == "scalar" and shape else made.spec.typestr,
            shape,
            dtype.name,
            dtype.itemsize,
            tuple([size or 1 for size in shape]),
        )
        return StoredLeaf(info, spec, about)

    @property
    def _is_flat(self) -> bool:
        """True if names are keys, as those of a safetensors file that was not split."""
        stored = self._checkpoint.leaves
        return (
            bool(stored)
            and all(len(leaf.info.keys) == 1 for leaf in stored)
            and (isinstance(self._checkpoint, NamedTensors) or any("." in leaf.info.name for leaf in stored))
        )

    def _problem(self, text: str) -> None:
        self._problems.append(f"{self._rule}: {text}")

    def _found(self, rule: Rule, pattern: Pattern) -> list[tuple[str, Bindings]]:
        """Return the names that fit a pattern, in order."""
        found: list[tuple[str, Bindings]] = []
        if pattern.is_plain:
            found = [(pattern.text, {})] if pattern.text in self._leaves else []
        else:
            for name in self._leaves:
                bindings = pattern.match(name)
                if bindings is not None:
                    found.append((name, bindings))

        if not found and not rule.optional:
            shell = pattern.fill(dict.fromkeys(pattern.groups, "*"))
            near = near_leaves(shell, [tuple(name.split(".")) for name in self._leaves])
            self._problem(f"no leaf is named {pattern.text!r}; {near}")

        return found

    def _replace(self, by_name: Mapping[str, Sequence[tuple[str, _Made]]]) -> None:
        """Put other leaves in the places of some."""
        made: dict[str, _Made] = {}
        for name, leaf in self._leaves.items():
            for new, each in by_name.get(name, [(name, leaf)]):
                if new in made:
                    self._problem(f"two leaves would have the name {new!r}")
                made[new] = each

        self._leaves = made

    def _from(self, leaves: Sequence[_Made], array: Array | None) -> _Made:
        """Return a leaf that this rule makes of others."""
        first = leaves[0]
        sources = tuple(dict.fromkeys([name for leaf in leaves for name in leaf.about.sources]))
        rules = (*dict.fromkeys([rule for leaf in leaves for rule in leaf.about.rules]), self._number)
        same = array is not None and array is first.about.array
        number = first.about.number if same or array is None else None
        return _Made(first.info, first.spec, Derivation(sources, rules, number, array), is_taken=True)

    def _array(self, name: str) -> Array:
        made = self._leaves[name]
        if made.about.array is None or made.spec.extended_dtype is not None:
            kind = "random keys" if made.spec.extended_dtype is not None else f"a {made.spec.typestr}"
            raise UnfitError(f"is {kind}, and no array of plain numbers")

        return made.about.array

    def _each(
        self,
        rule: Rule,
        change: Callable[[Array], Array],
        passes_over: Callable[[_Made], bool] | None = None,
    ) -> None:
        """Make one leaf of each that fits."""
        made: dict[str, list[tuple[str, _Made]]] = {}
        for name, bindings in self._found(rule, rule.sources[0]):
            leaf = self._leaves[name]
            if passes_over is not None and not rule.sources[0].is_plain and passes_over(leaf):
                made[name] = [(name, replace(leaf, is_taken=True))]  # it was meant, with all others
                continue

            new = name if rule.to is None else rule.results[0].fill(bindings)
            try:
                array = leaf.about.array if change is _as_it_is else change(self._array(name))
            except UnfitError as error:
                self._problem(f"{name!r} {error}")
                continue
            if leaf.about.array is None and not leaf.spec.is_empty_marker and leaf.spec.text is None:
                self._problem(f"{name!r} is in files of its own handler; rename= of a restore renames it")
                continue

            made[name] = [(new, self._from([leaf], array))]

        self._replace(made)

    def _parts(self, rule: Split | Unstack, cut: Callable[[Array, int | None], Sequence[Array]]) -> None:
        """Make several leaves of each that fits."""
        made: dict[str, list[tuple[str, _Made]]] = {}
        over = rule.over
        for name, bindings in self._found(rule, rule.sources[0]):
            leaf = self._leaves[name]
            try:
                parts = cut(self._array(name), None if over is not None else len(rule.results))
            except UnfitError as error:
                self._problem(f"{name!r} {error}")
                continue
            if over is not None:
                names = [rule.results[0].fill({**bindings, over: str(at)}) for at in range(len(parts))]
            else:
                names = [one.fill(bindings) for one in rule.results]

            made[name] = [(new, self._from([leaf], part)) for new, part in zip(names, parts, strict=True)]

        self._replace(made)

    def _joined(self, rule: Concat | Stack, join: Callable[[Sequence[Array]], Array]) -> None:
        """Make one leaf of several each time."""
        made: dict[str, list[tuple[str, _Made]]] = {}
        groups: dict[str, list[str]] = {}
        if rule.over is not None:
            groups = self._numbered(rule, rule.over)
        else:
            for name, bindings in self._found(rule, rule.sources[0]):
                others = [one.fill(bindings) for one in rule.sources[1:]]
                absent = [other for other in others if other not in self._leaves]
                if absent:
                    self._problem(f"{name!r} is there, and {', '.join(map(repr, absent))} is not")
                else:
                    groups[rule.results[0].fill(bindings)] = [name, *others]

        for new, names in groups.items():
            try:
                parts = [self._array(name) for name in names]
                array = join(parts)
            except UnfitError as error:
                self._problem(f"{new!r} of {names[0]!r} and others {error}")
                continue

            made.update({name: [] for name in names[1:]})
            made[names[0]] = [(new, self._from([self._leaves[name] for name in names], array))]

        self._replace(made)

    def _numbered(self, rule: Concat | Stack, over: str) -> dict[str, list[str]]:
        """Return the names that are joined over their numbers, by the name of the result."""
        by_result: dict[str, dict[int, str]] = {}
        for name, bindings in self._found(rule, rule.sources[0]):
            by_result.setdefault(rule.results[0].fill(bindings), {})[int(bindings[over])] = name

        groups: dict[str, list[str]] = {}
        for new, numbered in by_result.items():
            absent = next((at for at in range(len(numbered)) if at not in numbered), None)
            if absent is not None:
                there = ", ".join(map(str, sorted(numbered)[:8]))
                self._problem(f"{new!r} is joined of numbers from 0 on, and {absent} is not there: {there}")
            else:
                groups[new] = [numbered[at] for at in range(len(numbered))]

        return groups

    def _dequantize(self, rule: Dequantize) -> None:
        made: dict[str, list[tuple[str, _Made]]] = {}
        scales_of = Pattern(rule.scales)
        for name, bindings in self._found(rule, rule.sources[0]):
            scales = scales_of.fill(bindings)
            if scales not in self._leaves:
                if rule.sources[0].is_plain:
                    self._problem(f"{name!r} is there, and its scales {scales!r} are not")
                continue  # of many names some are not quantized

            new = name if rule.to is None else rule.results[0].fill(bindings)
            try:
                array = _dequantized(rule, self._array(name), self._array(scales))
            except UnfitError as error:
                self._problem(f"{name!r} {error}")
                continue

            made[scales] = []
            made[name] = [(new, self._from([self._leaves[name], self._leaves[scales]], array))]

        if not made and not rule.optional:
            self._problem(f"no leaf has scales named {rule.scales!r}")

        self._replace(made)

    def _constant(self, rule: Constant) -> None:
        name = rule.sources[0].text
        if name in self._leaves:
            self._problem(f"there is a leaf {name!r} already")
            return
        try:
            dtype = _dtype(rule.dtype)
            value: NdArray = np.empty((), dtype)
            with np.errstate(all="ignore"):
                value[...] = np.asarray(rule.value).astype(dtype)
        except (UnfitError, TypeError, ValueError, OverflowError) as error:
            self._problem(f"{name!r} {error}")
            return

        info = ParamInfo((name,), (KeyKind.MAPPING,), f"[{name!r}]")
        if not self._is_flat:
            keys: KeyPath = tuple(name.split("."))
            info = renamed_info(ParamInfo((), (), ""), keys)
        spec = LeafSpec(self._typestr, (), dtype.name, dtype.itemsize)
        about = Derivation((), (self._number,), None, arrays.Constant(value, rule.shape))
        self._leaves[name] = _Made(info, spec, about, is_taken=True)


def _stored(number: int, spec: LeafSpec) -> Array | None:
    if spec.shape is None:
        return None
    try:
        return arrays.Stored(number, spec.shape, np.dtype(spec.dtype))
    except TypeError:
        return arrays.Stored(number, spec.shape, np.dtype(f"V{spec.itemsize}"))  # its reader raises the error


def _is_no_array(made: _Made) -> bool:
    return made.about.array is None or made.spec.extended_dtype is not None


def _passes_over(rule: Cast, made: _Made) -> bool:
    array = made.about.array
    if array is None or made.spec.extended_dtype is not None:
        return True
    if rule.from_dtype is not None:
        return array.dtype != _known(rule.from_dtype)

    wanted = _known(rule.dtype)
    return wanted is not None and kind_of(array.dtype) != kind_of(wanted)


def _as_it_is(array: Array) -> Array:
    return array


def _known(name: str) -> np.dtype[Any] | None:
    try:
        return np.dtype(name)
    except TypeError:
        return None


def _dtype(name: str) -> np.dtype[Any]:
    found = _known(name)
    if found is None:
        raise UnfitError(f"cannot be {name!r}, which is no dtype")

    return found


def _axis(axis: int, array: Array, *, new: bool = False) -> int:
    n = len(array.shape) + new
    if not -n <= axis < n:
        raise UnfitError(f"has the shape {list(array.shape)}, and no axis {axis}")

    return axis % n


def _cast(rule: Cast, array: Array) -> Array:
    dtype = _dtype(rule.dtype)
    if rule.from_dtype is not None and array.dtype != _dtype(rule.from_dtype):
        raise UnfitError(f"is {array.dtype.name}, not {rule.from_dtype}")
    if dtype == array.dtype:
        return array

    problem = why_not_cast(array.dtype, dtype)
    if problem:
        raise UnfitError(f"cannot be cast from {array.dtype.name} to {dtype.name}: {problem}")

    return arrays.Mapped(array, dtype, partial(_cast_elements, rule.max_cast_error, str(rule)))


_BLOCK: Final = 1 << 16
"""Elements that are compared at a time, in wider numbers."""


def _cast_elements(most: float | None, rule: str, before: NdArray, after: NdArray) -> None:
    with np.errstate(all="ignore"):  # what does not fit is cast as in C, without a warning
        np.copyto(after, before, casting="unsafe")
        if most is None:
            return

        for start in range(0, before.size, _BLOCK):
            old, new = before.flat[start : start + _BLOCK], after.flat[start : start + _BLOCK]
            bad = _differ(old, new) if not most else _differ_by(old, new, most)
            if bad.any():
                at = int(np.argmax(bad))
                raise UnfitError(f"has {old[at]}, which {rule} would make {new[at]}")


def _differ(old: Any, new: Any) -> Any:
    back = new.astype(old.dtype)
    same = back == old
    if kind_of(old.dtype) is np.integer and kind_of(new.dtype) is np.integer:
        return ~(same & ((old < 0) == (new < 0)))

    return ~(same | ((old != old) & (new != new)))


def _differ_by(old: Any, new: Any, most: float) -> Any:
    wide: Any = (
        np.complex128 if np.complexfloating in (kind_of(old.dtype), kind_of(new.dtype)) else np.float64
    )
    x, y = old.astype(wide), new.astype(wide)
    least = _smallest_normal(new.dtype)
    near = np.abs(y - x) <= most * np.maximum(np.abs(x), least)
    return ~(near | (x == y) | (np.isnan(x) & np.isnan(y)))


def _smallest_normal(dtype: np.dtype[Any]) -> float:
    if kind_of(dtype) is not np.floating:
        return 0.0

    finfo: Any = cast("Any", jax.dtypes).finfo  # NumPy's knows no bfloat16
    return float(finfo(dtype).smallest_normal)


def _transposed(rule: Transpose, array: Array) -> Array:
    axes = rule.axes if rule.axes is not None else tuple(reversed(range(len(array.shape))))
    if len(axes) != len(array.shape):
        raise UnfitError(f"has the shape {list(array.shape)}, and not {len(axes)} axes")

    return arrays.Transposed(array, axes)


def _reshaped(rule: Reshape, array: Array) -> Array:
    first, stop = 0, len(array.shape)
    if rule.axis is not None:
        first = _axis(rule.axis, array)
        stop = first + len(rule.from_shape or ())

    part, at = array.shape[first:stop], "" if rule.axis is None else f" from axis {rule.axis} on"
    if rule.from_shape is not None and part != _filled(rule.from_shape, part):
        raise UnfitError(f"has the shape {list(array.shape)}, not {list(rule.from_shape)}{at}")

    made = _filled(rule.shape, part)
    if math.prod(made) != math.prod(part):
        raise UnfitError(f"has the shape {list(array.shape)}, which does not fit {list(rule.shape)}{at}")

    shape = (*array.shape[:first], *made, *array.shape[stop:])
    return array if shape == array.shape else arrays.Reshaped(array, shape)


def _filled(shape: Sequence[int], of: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with the size that -1 stands for."""
    known = math.prod([size for size in shape if size != -1])
    return tuple([math.prod(of) // max(known, 1) if size == -1 else size for size in shape])


def _selected(rule: Select, array: Array) -> Array:
    axis = _axis(rule.axis, array)
    size = array.shape[axis]
    if rule.indices is not None:
        outside = [at for at in rule.indices if not -size <= at < size]
        if outside:
            raise UnfitError(f"has {size} along axis {rule.axis}, and no index {outside[0]}")

        return arrays.Taken(array, axis, [at % size for at in rule.indices])

    for name, at in (("start", rule.start), ("stop", rule.stop)):
        if at is not None and not -size <= at <= size:
            raise UnfitError(f"has {size} along axis {rule.axis}, and {name} is {at}")

    start, stop, step = slice(rule.start, rule.stop, rule.step).indices(size)
    return arrays.Sliced(array, axis, start, len(range(start, stop, step)), step)


def _padded(rule: Pad, array: Array) -> Array:
    axis = _axis(rule.axis, array)
    size = array.shape[axis]
    if rule.from_size is not None and size != rule.from_size:
        raise UnfitError(f"has {size} along axis {rule.axis}, not {rule.from_size}")
    if size > rule.to_size:
        raise UnfitError(f"has {size} along axis {rule.axis}, which is more than {rule.to_size}")
    if size == rule.to_size:
        return array

    value: NdArray = np.empty((), array.dtype)
    value[...] = np.asarray(rule.value).astype(array.dtype)
    shape = (*array.shape[:axis], rule.to_size - size, *array.shape[axis + 1 :])
    return arrays.Joined((array, arrays.Constant(value, shape)), axis)


def _repeated(rule: Repeat, array: Array) -> Array:
    return arrays.Repeated(array, _axis(rule.axis, array), rule.times)


def _split(rule: Split, array: Array, n: int | None) -> Sequence[Array]:
    axis = _axis(rule.axis, array)
    size = array.shape[axis]
    if rule.sizes is None:
        assert n is not None, "without sizes, names say how many parts there are"
        if size % n:
            raise UnfitError(f"has {size} along axis {rule.axis}, which {n} equal parts do not divide")
        sizes: Sequence[int] = [size // n] * n
    else:
        known = sum([each for each in rule.sizes if each != -1])
        sizes = [size - known if each == -1 else each for each in rule.sizes]
        if sum(sizes) != size or min(sizes) < 0:
            raise UnfitError(f"has {size} along axis {rule.axis}, and sizes are {list(rule.sizes)}")

    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [arrays.Sliced(array, axis, start, each) for start, each in zip(starts, sizes, strict=True)]


def _unstacked(rule: Unstack, array: Array, n: int | None) -> Sequence[Array]:
    axis = _axis(rule.axis, array)
    size = array.shape[axis]
    if n is not None and size != n:
        raise UnfitError(f"has {size} along axis {rule.axis}, and {n} names in `to`")

    shape = (*array.shape[:axis], *array.shape[axis + 1 :])
    return [arrays.Reshaped(arrays.Sliced(array, axis, at, 1), shape) for at in range(size)]


def _check_alike(parts: Sequence[Array], axis: int | None) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype:
            raise UnfitError(f"has parts of {first.dtype.name} and {part.dtype.name}; cast them first")

        shapes = [[each for at, each in enumerate(one.shape) if at != axis] for one in (first, part)]
        if shapes[0] != shapes[1] or len(first.shape) != len(part.shape):
            raise UnfitError(f"has parts of the shapes {list(first.shape)} and {list(part.shape)}")


def _concatenated(rule: Concat, parts: Sequence[Array]) -> Array:
    axis = _axis(rule.axis, parts[0])
    _check_alike(parts, axis)
    sizes = tuple([part.shape[axis] for part in parts])
    if rule.sizes == "equal" and len(set(sizes)) > 1:
        raise UnfitError(f"has parts of {list(sizes)} along axis {rule.axis}, which are not equal")
    if rule.sizes not in (None, "equal") and sizes != _filled_sizes(rule.sizes, sizes):
        raise UnfitError(f"has parts of {list(sizes)} along axis {rule.axis}, and sizes are {rule.sizes}")

    return arrays.Joined(parts, axis)


def _filled_sizes(wanted: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(wanted, sizes, strict=True) if len(wanted) == len(sizes) else ()
    return tuple([size if each == -1 else each for each, size in pairs])


def _stacked(rule: Stack, parts: Sequence[Array]) -> Array:
    axis = _axis(rule.axis, parts[0], new=True)
    _check_alike(parts, None)
    shape = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    return arrays.Joined([arrays.Reshaped(part, shape) for part in parts], axis)


def _dequantized(rule: Dequantize, array: Array, scales: Array) -> Array:
    dtype = _dtype(rule.dtype)
    shape = array.shape
    if rule.format == "mxfp4":
        if (
            array.dtype != np.uint8
            or len(shape) < 2
            or scales.shape != shape[:-1]
            or scales.dtype.itemsize != 1
        ):
            raise UnfitError(
                f"is {array.dtype.name}{list(shape)} with scales {scales.dtype.name}{list(scales.shape)}; "
                "mxfp4 is uint8 of [..., rows, bytes] with uint8 scales of [..., rows]"
            )
        return arrays.Unpacked(array, scales, dtype)

    block = rule.block
    if block is not None:
        if len(block) != len(shape):
            raise UnfitError(f"has the shape {list(shape)}, and block is {list(block)}")
        grid = tuple([-(-size // each) for size, each in zip(shape, block, strict=True)])
        if scales.shape != grid:
            raise UnfitError(f"has {list(grid)} blocks, and scales of the shape {list(scales.shape)}")
    elif math.prod(scales.shape) == 1:
        block = tuple([size or 1 for size in shape])
        scales = arrays.Reshaped(scales, (1,) * len(shape))
    elif len(scales.shape) == 1:
        axis = _axis(rule.axis, array)
        if scales.shape[0] != shape[axis]:
            raise UnfitError(f"has {shape[axis]} along axis {rule.axis}, and {scales.shape[0]} scales")
        block = tuple([1 if at == axis else size or 1 for at, size in enumerate(shape)])
        if len(shape) > 1:
            grid = tuple([size if at == axis else 1 for at, size in enumerate(shape)])
            scales = arrays.Reshaped(scales, grid)
    else:
        pairs = list(zip(shape, scales.shape, strict=False))
        if len(scales.shape) != len(shape) or any(not n or size % n for size, n in pairs):
            raise UnfitError(
                f"has the shape {list(shape)}, which scales of {list(scales.shape)} do not divide; say block"
            )
        block = tuple([size // n or 1 for size, n in pairs])

    return arrays.Scaled(array, scales, block, dtype)
