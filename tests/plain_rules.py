"""Rules as anyone would write them with NumPy and all leaves in memory; and random trees with random rules.

What the engine makes of files, piece by piece, is compared with this.
"""

from __future__ import annotations

__all__ = ("Leaves", "apply_plainly", "same_bits", "trees_with_rules")

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from penstock.rules import (
    Cast,
    Concat,
    Constant,
    Dequantize,
    Drop,
    Pad,
    Rename,
    Repeat,
    Reshape,
    Rule,
    Select,
    Split,
    Stack,
    Transpose,
    Unstack,
)

Leaves: TypeAlias = dict[str, npt.NDArray[Any]]

DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
    "bfloat16", "int4", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
]  # fmt: skip
FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether two arrays are the same, NaN payloads and signs of zeros included."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def apply_plainly(rules: Sequence[Rule], leaves: Leaves) -> Leaves:
    """Return the leaves that rules make of others."""
    for rule in rules:
        leaves = _apply(rule, dict(leaves))

    return leaves


def _apply(rule: Rule, leaves: Leaves) -> Leaves:
    if isinstance(rule, Constant):
        leaves[rule.source] = np.full(rule.shape, rule.value).astype(rule.dtype)
        return leaves
    if isinstance(rule, Stack | Concat) and rule.over is not None:
        together: dict[str, dict[int, str]] = {}
        for name in leaves:
            found = rule.sources[0].match(name)
            if found is not None:
                to = rule.results[0].fill(found)
                together.setdefault(to, {})[int(found[rule.over])] = name

        for to, numbered in together.items():
            leaves[to] = _join(rule, [leaves.pop(numbered[at]) for at in range(len(numbered))])

        return leaves

    made: Leaves = {}
    taken: set[str] = set()
    for name in leaves:
        found = rule.sources[0].match(name)
        if found is None:
            continue

        names = [one.fill(found) for one in rule.sources]
        if isinstance(rule, Dequantize):
            names.append(rule.scales)

        taken.update(names)
        parts = [leaves[one] for one in names]
        new = [one.fill(found) for one in rule.results] if rule.over is None else []
        match rule:
            case Drop():
                pass
            case Stack() | Concat():
                made[new[0]] = _join(rule, parts)
            case Split():
                sizes = rule.sizes
                at: Any = len(new) if sizes is None else np.cumsum(sizes)[:-1]
                made.update(zip(new, np.split(parts[0], at, rule.axis), strict=True))
            case Unstack():
                assert rule.over is not None
                for number in range(parts[0].shape[rule.axis]):
                    into = rule.results[0].fill({**found, rule.over: str(number)})
                    made[into] = np.take(parts[0], number, rule.axis)
            case _:
                made[new[0]] = _one(rule, parts)

    rest = {name: array for name, array in leaves.items() if name not in taken}
    return {**rest, **made}


def _join(rule: Rule, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if isinstance(rule, Stack):
        return np.stack(parts, rule.axis)

    assert isinstance(rule, Concat)
    return np.concatenate(parts, rule.axis)


def _one(rule: Rule, parts: Sequence[Any]) -> Any:
    array = parts[0]
    with np.errstate(all="ignore"):
        match rule:
            case Rename():
                return array
            case Cast():
                return array.astype(rule.dtype)
            case Transpose():
                return np.transpose(array, rule.axes)
            case Reshape():
                first, stop = 0, array.ndim
                if rule.axis is not None:
                    first = rule.axis % array.ndim
                    stop = first + len(rule.from_shape or ())

                made = (*array.shape[:first], *rule.shape, *array.shape[stop:])
                return np.ascontiguousarray(array).reshape(made)
            case Select():
                if rule.indices is not None:
                    return np.take(array, rule.indices, rule.axis)

                part: list[Any] = [slice(None)] * array.ndim
                part[rule.axis] = slice(rule.start, rule.stop, rule.step)
                return array[tuple(part)]
            case Pad():
                shape = list(array.shape)
                shape[rule.axis] = rule.to_size - shape[rule.axis]
                more = np.full(shape, rule.value).astype(array.dtype)
                return np.concatenate([array, more], rule.axis)
            case Repeat():
                return np.repeat(array, rule.times, rule.axis)
            case Dequantize():
                assert rule.block is not None
                scales = parts[1]
                for axis, size in enumerate(rule.block):
                    scales = np.repeat(scales, size, axis).take(range(array.shape[axis]), axis)
                return (array.astype(np.float32) * scales.astype(np.float32)).astype(rule.dtype)
            case _:
                raise AssertionError(rule)


@st.composite
def trees_with_rules(
    draw: st.DrawFn, most_rules: int = 5, most_axes: int = 4, sizes: tuple[int, int] = (1, 7)
) -> tuple[Leaves, list[Rule]]:
    """Draw a tree, by dotted names, and rules that fit it.

    Args:
        draw: Given by hypothesis.
        most_rules: The most rules.
        most_axes: Of a leaf.
        sizes: The least and the most along an axis.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    leaves: Leaves = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(*sizes), max_size=most_axes)))
        count = draw(st.sampled_from([0, 0, 2, 3]))
        for at in range(count or 1):
            leaves[f"l{number}.{at}.w" if count else f"l{number}.w"] = _random(random, shape, dtype)

    rules: list[Rule] = []
    now = leaves
    for number in range(draw(st.integers(1, most_rules))):
        rule = draw(_rules(now, number))
        if rule is not None:
            rules.append(rule)
            now = apply_plainly([rule], now)

    return leaves, rules


def _random(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return random bits: NaNs with payloads, infinities, subnormals and negative zeros are among them."""
    wanted = np.dtype(dtype)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype == "int4":
        return random.integers(-8, 8, shape).astype(ml_dtypes.int4)

    bits = random.integers(0, 256, (*shape, wanted.itemsize), dtype=np.uint8)
    return np.ascontiguousarray(bits).view(wanted).reshape(shape)


@st.composite
def _rules(draw: st.DrawFn, leaves: Leaves, number: int) -> Rule | None:
    """Draw a rule that fits some of the leaves; None if the one that was drawn fits none."""
    if not leaves:
        return Constant("made", value=2, shape=(2, 3), dtype="bfloat16")

    name = draw(st.sampled_from(sorted(leaves)))
    array = leaves[name]
    new = f"m{number}"
    to = draw(st.sampled_from([None, new]))
    kinds = ["rename", "constant", "drop", "reshape", "cast", "stack"]
    if array.ndim:
        kinds += [
            "transpose",
            "transpose",
            "split",
            "concat",
            "unstack",
            "select",
            "indices",
            "pad",
            "repeat",
            "scale",
        ]

    kind = draw(st.sampled_from(kinds))
    axis = draw(st.integers(-array.ndim, array.ndim - 1)) if array.ndim else 0
    size = array.shape[axis] if array.ndim else 1
    alike = [
        one for one in sorted(leaves) if leaves[one].shape == array.shape and leaves[one].dtype == array.dtype
    ]
    match kind:
        case "rename":
            return Rename(name, new)
        case "constant":
            return Constant(new, value=draw(st.integers(-3, 3)), shape=array.shape, dtype=array.dtype.name)
        case "drop":
            return Drop(name)
        case "transpose":
            axes = draw(st.one_of(st.none(), st.permutations(range(array.ndim))))
            return Transpose(name, to, axes=None if axes is None else tuple(axes))
        case "reshape":
            if not array.ndim or draw(st.booleans()):
                return Reshape(name, to, shape=draw(_shapes(array.size)))

            axis = draw(st.integers(0, array.ndim - 1))
            before = array.shape[axis : axis + draw(st.integers(1, array.ndim - axis))]
            made = draw(_shapes(int(np.prod(before))))
            return Reshape(name, to, shape=made or (1,), from_shape=before, axis=axis)
        case "cast":
            if array.dtype.name not in FLOATS:
                return None
            return Cast(name, to, dtype=draw(st.sampled_from(FLOATS)))
        case "stack" | "concat":
            first, *rest = name.split(".")
            numbered = [one for one in leaves if one.startswith(f"{first}.") and one.endswith(".w")]
            whole = all(f"{first}.{at}.w" in alike for at in range(len(numbered)))
            if len(rest) == 2 and whole:
                pattern = first + ".{i:int}.w"
                if kind == "stack":
                    return Stack(pattern, new, axis=draw(st.integers(0, array.ndim)))
                return Concat(pattern, new, axis=axis)

            others = (
                draw(st.lists(st.sampled_from(alike), min_size=2, max_size=3, unique=True))
                if len(alike) > 1
                else []
            )
            if not others:
                return None
            if kind == "stack":
                return Stack(others, new, axis=draw(st.integers(0, array.ndim)))
            return Concat(others, new, axis=axis)
        case "split":
            cuts = sorted(draw(st.lists(st.integers(0, size), min_size=1, max_size=2)))
            sizes = tuple(int(each) for each in np.diff([0, *cuts, size]))
            return Split(name, [f"{new}.{at}" for at in range(len(sizes))], axis=axis, sizes=sizes)
        case "unstack":
            return Unstack(name, new + ".{i:int}.w", axis=axis)
        case "select" | "indices" if not size:
            return None
        case "select":
            start = draw(st.integers(0, size - 1))
            return Select(name, to, axis=axis, start=start, stop=draw(st.integers(start + 1, size)),
                          step=draw(st.integers(1, 6)))  # fmt: skip
        case "indices":
            return Select(
                name,
                to,
                axis=axis,
                indices=tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))),
            )
        case "pad":
            value = draw(st.integers(0, 1))
            return Pad(name, to, axis=axis, to_size=max(size, 1) + draw(st.integers(0, 3)), value=value)
        case "repeat":
            return Repeat(name, to, axis=axis, times=draw(st.integers(1, 3)))
        case _:
            return None


@st.composite
def _shapes(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    shape: list[int] = []
    left = size
    while left > 1:
        factor = draw(st.sampled_from([each for each in range(2, left + 1) if left % each == 0]))
        shape.append(factor)
        left //= factor
    for _ in range(draw(st.integers(0, 2)) if size else 0):
        shape.insert(draw(st.integers(0, len(shape))), 1)

    return (*shape,) if size else (0,)
