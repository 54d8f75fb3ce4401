"""Rules as data: what becomes of the leaves of a checkpoint, from names to names. Pure, without arrays.

A rule names leaves by patterns, and the names that its results get. Rules apply in order, each to the names
that those before it gave. `stages/rules` applies them to what is stored.

A pattern is a dotted name. `{name}` stands for one key, `{i:int}` for a number, `{rest...}` for one key or
several; what stands twice must be the same. `*` is any text within a key, `**` any text; they give
nothing to `to`.
"""

from __future__ import annotations

__all__ = (
    "MADE_BY",
    "RULES",
    "Cast",
    "Concat",
    "Constant",
    "Dequantize",
    "Drop",
    "Pad",
    "Pattern",
    "Rename",
    "Repeat",
    "Reshape",
    "Rule",
    "Rules",
    "Select",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "parse_rules",
)

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final, Literal, TypeAlias, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.words import hint_at

Bindings: TypeAlias = Mapping[str, str]
"""The text that each group of a pattern stands for, by the name of the group."""

_TOKEN: Final = re.compile(
    r"\{(?P<name>[A-Za-z_]\w*)(?P<kind>:int|\.\.\.)?\}|(?P<many>\*\*)|(?P<any>\*)|(?P<text>[^{}*]+)"
)
_KINDS: Final = {None: r"[^.]+", ":int": r"0|[1-9][0-9]*", "...": r"[^.]+(?:\.[^.]+)*"}


@final
class Pattern:
    """A dotted name with groups, read once.

    Args:
        text: As it is written in a rule.

    Raises:
        SpecError: If it is no pattern.

    Attributes:
        text: As it was given.
        groups: The kind of each group, by its name: `":int"`, `"..."` or None.
        is_plain: True if it is the name of one leaf.
    """

    __slots__ = ("_regex", "_tokens", "groups", "is_plain", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.groups: dict[str, str | None] = {}
        self._tokens: list[tuple[str, bool]] = []  # text, and whether it is the name of a group
        regex, at = "", 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                problem = f"{text[at:]!r} is neither a name nor one of {{name}}, {{i:int}}, {{rest...}}"
                raise SpecError(f"{text!r} is no pattern: {problem}")

            at = found.end()
            name, kind = found["name"], found["kind"]
            if name is None:
                self._tokens.append((found[0], False))
                regex += ".+" if found["many"] else "[^.]*" if found["any"] else re.escape(found[0])
                continue
            if name in self.groups and self.groups[name] != kind:
                raise SpecError(f"{text!r} is no pattern: {{{name}}} is of two kinds")

            regex += f"(?P={name})" if name in self.groups else f"(?P<{name}>{_KINDS[kind]})"
            self.groups[name] = kind
            self._tokens.append((name, True))

        if not text:
            raise SpecError("a rule names leaves by a pattern, and it is empty")

        self._regex = re.compile(regex)
        self.is_plain = not self.groups and "*" not in text

    def match(self, name: str) -> Bindings | None:
        """Return what the groups stand for in a name; None if it does not fit."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, bindings: Bindings) -> str:
        """Return the name that has these texts in place of the groups."""
        return "".join([bindings[text] if is_group else text for text, is_group in self._tokens])

    @property
    def is_loose(self) -> bool:
        """True if it has a `*`, so that no name can be made of it."""
        return any("*" in text for text, is_group in self._tokens if not is_group)


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Return the pattern that a text is."""
    return Pattern(text)


@dataclass(frozen=True)
class Rule:
    """An operation on some leaves.

    Attributes:
        operation: Its key in TOML.
        source: The pattern of the leaves that it takes, or several for operations that join leaves.
        to: The pattern of the name that its result gets, or several; by default the source's own.
        optional: Whether it may find no leaf.
    """

    operation: ClassVar[str]
    example: ClassVar[str]  #: as it stands in a file
    joins: ClassVar[bool] = False  #: several leaves become one
    parts: ClassVar[bool] = False  #: one leaf becomes several

    source: Any
    to: Any = None
    optional: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._set("source", _names(self.operation, "source", self.source, several=self.joins))
        if self.to is not None:
            self._set("to", _names(self.operation, "to", self.to, several=self.parts))
        elif len(self.sources) > 1 or (any(one.is_loose for one in self.sources) and self.makes_names):
            raise self.invalid("needs `to`: the name of its result")

        self._check_groups()
        self.check()

    @property
    def makes_names(self) -> bool:
        """True if the result never has the source's name."""
        return False

    @property
    def sources(self) -> tuple[Pattern, ...]:
        """The patterns of the leaves that it takes."""
        return tuple(map(pattern, _tuple(self.source)))

    @property
    def results(self) -> tuple[Pattern, ...]:
        """The patterns of its results' names; the sources' if it keeps names."""
        return self.sources if self.to is None else tuple(map(pattern, _tuple(self.to)))

    @property
    def over(self) -> str | None:
        """The group that is in one side alone: the number that leaves are joined over, or parted into."""
        inner, outer = (self.sources, self.results) if self.joins else (self.results, self.sources)
        if not (self.joins or self.parts) or len(inner) != 1:
            return None

        extra = [name for name in inner[0].groups if name not in outer[0].groups]
        return extra[0] if len(extra) == 1 else None

    def check(self) -> None:
        """Raise `SpecError` if its values do not fit together."""

    def inverse(self) -> Rule:
        """Return the rule that undoes it.

        Raises:
            SpecError: If there is none.
        """
        raise self.no_inverse("what it takes away is not there any more")

    def no_inverse(self, reason: str) -> SpecError:
        """Make the error of a rule that cannot be undone."""
        return SpecError(f"{self} has no inverse: {reason}")

    def invalid(self, problem: str) -> SpecError:
        """Make the error of a rule that does not fit together."""
        return SpecError(f"rule {self.operation} = {_shown(self.source)}: {problem}")

    def _swapped(self) -> tuple[Any, Any]:
        return (self.source, None) if self.to is None else (self.to, self.source)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a frozen dataclass that normalises what it was given

    def _check_groups(self) -> None:
        sources, results = self.sources, self.results
        if self.to is None:
            return

        for one in results:
            if one.is_loose:
                raise self.invalid(f"`to` is {one.text!r}, and * gives no name")

        known = sources[0].groups
        for one in sources[1:]:
            if one.groups.keys() != known.keys():
                raise self.invalid(f"{sources[0].text!r} and {one.text!r} have different groups")

        made = results[0].groups
        for one in results[1:]:
            if one.groups.keys() != made.keys():
                raise self.invalid(f"{results[0].text!r} and {one.text!r} have different groups")

        unknown, lost = (
            [name for name in made if name not in known],
            [name for name in known if name not in made],
        )
        numbered = self.over
        if unknown and not (self.parts and unknown == [numbered]):
            raise self.invalid(f"{{{unknown[0]}}} is in `to` alone")
        if lost and not (self.joins and lost == [numbered]):
            raise self.invalid(f"{{{lost[0]}}} is not in `to`, so that several leaves would have one name")

        inner = sources if self.joins else results
        if numbered is not None and inner[0].groups[numbered] != ":int":
            raise self.invalid(f"{{{numbered}}} must be a number: write {{{numbered}:int}}")

    def table(self) -> dict[str, Any]:
        """Return the rule as a table of TOML has it."""
        found: dict[str, Any] = {self.operation: _plain(self.source)}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "source" and value != one.default:
                found[one.name] = _plain(value)

        return found

    def __str__(self) -> str:
        return ", ".join(f"{name} = {_shown(value)}" for name, value in self.table().items())


@final
@dataclass(frozen=True)
class Rename(Rule):
    """Gives a leaf another name."""

    operation: ClassVar[str] = "rename"
    example: ClassVar[str] = 'rename = "model.layers.{i}.mlp.up_proj.weight"\nto = "layers.{i}.up.kernel"'

    def check(self) -> None:
        if self.to is None:
            raise self.invalid("needs `to`: the new name")

    def inverse(self) -> Rule:
        return Rename(self.to, self.source, optional=self.optional)


@final
@dataclass(frozen=True)
class Cast(Rule):
    """Changes the dtype of elements, as in C.

    A pattern with groups or `*` passes over leaves of another kind than `dtype`, such as counters of steps
    for `bfloat16`, and over what is no array; a plain name is cast whatever it is.

    Attributes:
        dtype: The new one.
        from_dtype: Only leaves of this dtype. The inverse casts back to it.
        max_cast_error: The largest relative error; 0 for an exact cast. Values below the smallest normal
            number of `dtype` are compared with that. By default there is no limit.
    """

    operation: ClassVar[str] = "cast"
    example: ClassVar[str] = 'cast = "**"\ndtype = "bfloat16"\nmax_cast_error = 0.01'

    dtype: Any = field(default="", kw_only=True)
    from_dtype: Any = field(default=None, kw_only=True)
    max_cast_error: float | None = field(default=None, kw_only=True)

    def check(self) -> None:
        self._set("dtype", _dtype(self, "dtype", self.dtype))
        if self.from_dtype is not None:
            self._set("from_dtype", _dtype(self, "from_dtype", self.from_dtype))
        if self.max_cast_error is not None and not self.max_cast_error >= 0:
            raise self.invalid(f"max_cast_error is at least 0, not {self.max_cast_error!r}")

    def inverse(self) -> Rule:
        if self.from_dtype is None:
            raise self.no_inverse("say from_dtype, the dtype that it had")
        if self.max_cast_error != 0:
            raise self.no_inverse("it is not exact; say max_cast_error = 0")

        source, to = self._swapped()
        return Cast(
            source, to, dtype=self.from_dtype, from_dtype=self.dtype, max_cast_error=0, optional=self.optional
        )


@final
@dataclass(frozen=True)
class Transpose(Rule):
    """Permutes the axes of a leaf.

    Attributes:
        axes: The source's axis at each place, as in NumPy; by default they are reversed.
    """

    operation: ClassVar[str] = "transpose"
    example: ClassVar[str] = 'transpose = "layers.{i}.up.kernel"\naxes = [1, 0]'

    axes: tuple[int, ...] | None = field(default=None, kw_only=True)

    def check(self) -> None:
        if self.axes is not None:
            self._set("axes", _integers(self, "axes", self.axes))
            assert self.axes is not None
            if sorted(self.axes) != list(range(len(self.axes))):
                raise self.invalid(f"axes is an order of 0 to {len(self.axes) - 1}, not {list(self.axes)}")

    def inverse(self) -> Rule:
        source, to = self._swapped()
        axes = self.axes
        back = None if axes is None else tuple(sorted(range(len(axes)), key=axes.__getitem__))
        return Transpose(source, to, axes=back, optional=self.optional)


@final
@dataclass(frozen=True)
class Reshape(Rule):
    """Gives a leaf another shape, its elements in C order.

    Attributes:
        shape: The new one; one axis may be -1.
        from_shape: The shape that it must have before; one axis may be -1. The inverse needs it.
        axis: Where both are about a part of the axes: the first of them. Without `from_shape` it is that one.
    """

    operation: ClassVar[str] = "reshape"
    example: ClassVar[str] = 'reshape = "layers.{i}.q.kernel"\naxis = 1\nshape = [-1, 4]'

    shape: tuple[int, ...] = field(default=(), kw_only=True)
    from_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    axis: int | None = field(default=None, kw_only=True)

    def check(self) -> None:
        if self.axis is not None:
            _integers(self, "axis", (self.axis,))
            if self.from_shape is None:
                self._set("from_shape", (-1,))
        self._set("shape", _integers(self, "shape", self.shape))
        if self.from_shape is not None:
            self._set("from_shape", _integers(self, "from_shape", self.from_shape))
        for name, shape in (("shape", self.shape), ("from_shape", self.from_shape or ())):
            if any(size < -1 for size in shape) or shape.count(-1) > 1:
                raise self.invalid(f"{name} has one -1 at most, not {list(shape)}")
        if self.axis is not None and not (self.shape and self.from_shape):
            raise self.invalid("with axis, shape and from_shape have one axis at least")

    def inverse(self) -> Rule:
        if self.from_shape is None:
            raise self.no_inverse("say from_shape, the shape that it had")

        source, to = self._swapped()
        before = None if -1 in self.shape and self.axis is None else self.shape
        return Reshape(
            source, to, shape=self.from_shape, from_shape=before, axis=self.axis, optional=self.optional
        )


@final
@dataclass(frozen=True)
class Split(Rule):
    """Cuts a leaf into several along an axis.

    Attributes:
        axis: The axis that is cut.
        sizes: Of each part along it, one of which may be -1; by default they are equal.
    """

    operation: ClassVar[str] = "split"
    example: ClassVar[str] = 'split = "h.{i}.attn.weight"\nto = ["h.{i}.q", "h.{i}.k", "h.{i}.v"]\naxis = 1'
    parts: ClassVar[bool] = True

    axis: int = field(default=0, kw_only=True)
    sizes: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def makes_names(self) -> bool:
        return True

    def check(self) -> None:
        _integers(self, "axis", (self.axis,))
        if self.to is None or (len(self.results) < 2 and self.over is None):
            raise self.invalid("needs `to`: the names of the parts, as a list")
        if self.over is not None and self.sizes is None:
            raise self.invalid("needs sizes, since `to` is one pattern for parts of any number")
        if self.sizes is not None:
            self._set("sizes", _integers(self, "sizes", self.sizes))
            assert self.sizes is not None
            if any(size < -1 for size in self.sizes) or self.sizes.count(-1) > 1:
                raise self.invalid(f"sizes has one -1 at most, not {list(self.sizes)}")
            if self.over is None and len(self.sizes) != len(self.results):
                raise self.invalid(f"{len(self.results)} names in `to`, and {len(self.sizes)} sizes")

    def inverse(self) -> Rule:
        sizes: Any = "equal" if self.sizes is None else self.sizes
        return Concat(self.to, self.source, axis=self.axis, sizes=sizes, optional=self.optional)


@final
@dataclass(frozen=True)
class Concat(Rule):
    """Joins leaves along an axis: those of several patterns, or of one over a number in its name.

    Attributes:
        axis: The axis that they are joined along.
        sizes: What each must have along it, or `"equal"`. The inverse needs it.
    """

    operation: ClassVar[str] = "concat"
    example: ClassVar[str] = 'concat = ["h.{i}.q", "h.{i}.k", "h.{i}.v"]\nto = "h.{i}.qkv"\naxis = 0'
    joins: ClassVar[bool] = True

    axis: int = field(default=0, kw_only=True)
    sizes: tuple[int, ...] | Literal["equal"] | None = field(default=None, kw_only=True)

    def check(self) -> None:
        _check_joined(self, self.axis)
        if self.sizes is not None and self.sizes != "equal":
            self._set("sizes", _integers(self, "sizes", self.sizes))

    def inverse(self) -> Rule:
        if self.sizes is None:
            raise self.no_inverse('say sizes, of each part along the axis, or sizes = "equal"')

        sizes = None if self.sizes == "equal" else self.sizes
        return Split(self.to, self.source, axis=self.axis, sizes=sizes, optional=self.optional)


@final
@dataclass(frozen=True)
class Stack(Rule):
    """Joins leaves of one shape along a new axis: over a number in their names, or those of several patterns.

    The numbers begin at 0, without holes.

    Attributes:
        axis: The place of the new axis in the result.
    """

    operation: ClassVar[str] = "stack"
    example: ClassVar[str] = 'stack = "layers.{i:int}.up.kernel"\nto = "layers.up.kernel"\naxis = 0'
    joins: ClassVar[bool] = True

    axis: int = field(default=0, kw_only=True)

    def check(self) -> None:
        _check_joined(self, self.axis)

    def inverse(self) -> Rule:
        return Unstack(self.to, self.source, axis=self.axis, optional=self.optional)


@final
@dataclass(frozen=True)
class Unstack(Rule):
    """Takes a leaf apart along an axis, which the parts do not have: into numbered names, or a list of them.

    Attributes:
        axis: The axis that is taken apart.
    """

    operation: ClassVar[str] = "unstack"
    example: ClassVar[str] = 'unstack = "layers.up.kernel"\nto = "layers.{i:int}.up.kernel"\naxis = 0'
    parts: ClassVar[bool] = True

    axis: int = field(default=0, kw_only=True)

    @property
    def makes_names(self) -> bool:
        return True

    def check(self) -> None:
        _integers(self, "axis", (self.axis,))
        if self.to is None:
            raise self.invalid("needs `to`: the names of the parts, as in layers.{i:int}.kernel")

    def inverse(self) -> Rule:
        return Stack(self.to, self.source, axis=self.axis, optional=self.optional)


@final
@dataclass(frozen=True)
class Select(Rule):
    """Keeps a part of a leaf along an axis: a range, or single indices.

    Attributes:
        axis: The axis that is cut.
        start: The first index that is kept; negative ones count from the end.
        stop: The one after the last; by default the end.
        step: From one index to the next, at least 1.
        indices: In place of these: the indices that are kept, in the order of the result.
    """

    operation: ClassVar[str] = "select"
    example: ClassVar[str] = 'select = "embed.weight"\naxis = 0\nstop = 32000'

    axis: int = field(default=0, kw_only=True)
    start: int | None = field(default=None, kw_only=True)
    stop: int | None = field(default=None, kw_only=True)
    step: int = field(default=1, kw_only=True)
    indices: tuple[int, ...] | None = field(default=None, kw_only=True)

    def check(self) -> None:
        _integers(self, "axis", (self.axis, self.step))
        _integers(self, "start and stop", [each for each in (self.start, self.stop) if each is not None])
        if self.step < 1:
            raise self.invalid(f"step is at least 1, not {self.step}; use indices for another order")
        if self.indices is not None:
            self._set("indices", _integers(self, "indices", self.indices))
            if (self.start, self.stop, self.step) != (None, None, 1):
                raise self.invalid("either indices, or start, stop and step")


@final
@dataclass(frozen=True)
class Pad(Rule):
    """Makes a leaf longer along an axis, at its end.

    Attributes:
        axis: The axis.
        to_size: Its new size.
        value: What is there; 0 by default.
        from_size: The size that it must have before. The inverse needs it.
    """

    operation: ClassVar[str] = "pad"
    example: ClassVar[str] = 'pad = "embed.weight"\naxis = 0\nto_size = 128'

    axis: int = field(default=0, kw_only=True)
    to_size: int = field(default=0, kw_only=True)
    value: float = field(default=0, kw_only=True)
    from_size: int | None = field(default=None, kw_only=True)

    def check(self) -> None:
        _integers(self, "axis", (self.axis,))
        if _integers(self, "to_size", (self.to_size,)) < (1,):
            raise self.invalid("needs to_size, the new size of the axis")

    def inverse(self) -> Rule:
        if self.from_size is None:
            raise self.no_inverse("say from_size, the size that it had")

        source, to = self._swapped()
        return Select(source, to, axis=self.axis, stop=self.from_size, optional=self.optional)


@final
@dataclass(frozen=True)
class Repeat(Rule):
    """Repeats each index of an axis, as `numpy.repeat`: of grouped heads, one for each query.

    Attributes:
        axis: The axis.
        times: How often.
    """

    operation: ClassVar[str] = "repeat"
    example: ClassVar[str] = 'repeat = "layers.{i}.k.kernel"\naxis = 1\ntimes = 4'

    axis: int = field(default=0, kw_only=True)
    times: int = field(default=0, kw_only=True)

    def check(self) -> None:
        _integers(self, "axis", (self.axis,))
        if _integers(self, "times", (self.times,)) < (1,):
            raise self.invalid("needs times, at least 1")

    def inverse(self) -> Rule:
        source, to = self._swapped()
        return Select(source, to, axis=self.axis, step=self.times, optional=self.optional)


@final
@dataclass(frozen=True)
class Dequantize(Rule):
    """Makes plain numbers of quantized ones and their scales, which are taken, too.

    Each element is its number times the scale of its block, in float32.

    Attributes:
        scales: The pattern of the scales, with the groups of the source.
        dtype: Of the result.
        block: The shape of the block that a scale is for; by default what the shapes tell: scales with one
            axis are for the `axis` of the same size, others divide each axis evenly.
        axis: Of scales with one axis.
        format: `"scaled"` for fp8, int8 and other plain numbers. `"mxfp4"` for two numbers of 4 bits in
            each uint8, the first in the lower bits, with a uint8 exponent for each row of the last axis.
    """

    operation: ClassVar[str] = "dequantize"
    example: ClassVar[str] = (
        'dequantize = "{x...}.weight"\nscales = "{x...}.weight_scale_inv"\n'
        'block = [128, 128]\ndtype = "bfloat16"'
    )

    scales: str = field(default="", kw_only=True)
    dtype: Any = field(default="bfloat16", kw_only=True)
    block: tuple[int, ...] | None = field(default=None, kw_only=True)
    axis: int = field(default=0, kw_only=True)
    format: Literal["scaled", "mxfp4"] = field(default="scaled", kw_only=True)

    def check(self) -> None:
        self._set("dtype", _dtype(self, "dtype", self.dtype))
        if not isinstance(cast("object", self.scales), str) or not self.scales:
            raise self.invalid("needs scales: the pattern of the leaves with the scales")
        if pattern(self.scales).groups.keys() != self.sources[0].groups.keys() or self.sources[0].is_loose:
            raise self.invalid(f"{self.scales!r} must have the groups of the source, and neither has a *")
        if self.format not in ("scaled", "mxfp4"):
            raise self.invalid(f"format is 'scaled' or 'mxfp4', not {self.format!r}")
        if self.block is not None:
            self._set("block", _integers(self, "block", self.block))
            assert self.block is not None
            if min(self.block, default=1) < 1:
                raise self.invalid(f"block has sizes of at least 1, not {list(self.block)}")

    def inverse(self) -> Rule:
        raise self.no_inverse("quantized numbers are not recovered from others")


@final
@dataclass(frozen=True)
class Constant(Rule):
    """Makes a leaf whose elements all are one value, which no source gives.

    Attributes:
        value: The value.
        shape: Of the leaf; `[]` by default.
        dtype: Of the leaf.
    """

    operation: ClassVar[str] = "constant"
    example: ClassVar[str] = 'constant = "final_norm.bias"\nvalue = 0\nshape = [64]\ndtype = "float32"'

    value: float = field(default=0, kw_only=True)
    shape: tuple[int, ...] = field(default=(), kw_only=True)
    dtype: Any = field(default="float32", kw_only=True)

    def check(self) -> None:
        self._set("dtype", _dtype(self, "dtype", self.dtype))
        self._set("shape", _integers(self, "shape", self.shape))
        if not self.sources[0].is_plain or self.to is not None:
            raise self.invalid("is the name of one leaf, without groups and without `to`")
        if any(size < 0 for size in self.shape):
            raise self.invalid(f"shape has sizes of at least 0, not {list(self.shape)}")

    def inverse(self) -> Rule:
        return Drop(self.source, optional=self.optional)


@final
@dataclass(frozen=True)
class Drop(Rule):
    """Leaves a leaf out."""

    operation: ClassVar[str] = "drop"
    example: ClassVar[str] = 'drop = "{rest...}.rotary_emb.inv_freq"'

    def check(self) -> None:
        if self.to is not None:
            raise self.invalid("has no `to`: nothing comes of it")


MADE_BY: Final = "made_by_rules"
"""In the custom metadata of what was converted: how each leaf was made."""

RULES: Final[dict[str, type[Rule]]] = {
    kind.operation: kind
    for kind in (
        Rename, Cast, Transpose, Reshape, Split, Concat, Stack, Unstack, Select, Pad, Repeat, Dequantize,
        Constant, Drop,
    )
}  # fmt: skip
"""Every rule there is, by its key in TOML."""


@final
@dataclass(frozen=True)
class Rules(Sequence[Rule]):
    """Rules in the order in which they apply.

    Attributes:
        rules: Each applies to the names that those before it gave.
        rest: `"error"` if a leaf that no rule takes is an error, `"keep"` if it keeps its name. With a
            target, the target says which leaves are wanted, and this says nothing.
        are_inverse: Whether they undo those that were written, and so are in the reverse order.

    Raises:
        SpecError: If one is no rule.
    """

    rules: Sequence[Rule] = ()
    rest: Literal["error", "keep"] = field(default="error", kw_only=True)
    are_inverse: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for one in cast("tuple[object, ...]", self.rules):
            if not isinstance(one, Rule):
                raise SpecError(f"rules are those of penstock.rules, such as Rename('a', 'b'), not {one!r}")
        if self.rest not in ("error", "keep"):
            raise SpecError(f"rest is 'error' or 'keep', not {self.rest!r}")

    @classmethod
    def of(cls, given: Rules | Sequence[Rule] | Rule) -> Rules:
        """Return rules from what a caller may give as such: rules, one, or a sequence.

        Raises:
            SpecError: If it is anything else.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Rule):
            return cls((given,))
        if isinstance(cast("object", given), str) or not isinstance(cast("object", given), Sequence):
            raise SpecError(f"rules is a sequence of rules, or what load_rules returns, not {given!r}")

        return cls(given)

    def inverse(self) -> Rules:
        """Return the rules that undo these, in the reverse order.

        Raises:
            SpecError: If a rule has no inverse; the message names it, and says why.
        """
        rules = tuple([rule.inverse() for rule in reversed(self.rules)])
        return replace(self, rules=rules, are_inverse=not self.are_inverse)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names of results in the order in which the rules stand in their file.

        What is numbered goes together, as the layers of a model do: all of layer 0, then all of layer 1.
        Names that no rule makes come last, in the order of the names.
        """
        rules = reversed(self.rules) if self.are_inverse else self.rules
        results = [result for rule in rules for result in rule.results]
        ranks = {name: _rank(name, results) for name in names}
        first: dict[tuple[str, ...], int] = {}  # of all names that begin so, whatever their numbers
        for name, rank in ranks.items():
            keys = _without_numbers(name)
            for end in range(1, len(keys) + 1):
                first[keys[:end]] = min(rank, first.get(keys[:end], rank))

        def place(name: str) -> list[tuple[int, int, str]]:
            plain = _without_numbers(name)
            return [
                (first[plain[: at + 1]], int(key) if _is_number(key) else 0, key)
                for at, key in enumerate(name.split("."))
            ]

        return sorted(ranks, key=place)

    @cached_property
    def text(self) -> str:
        """The rules as a file of TOML."""
        head = [f"rest = {_shown(self.rest)}"] if self.rest != "error" else []
        tables = [
            "\n".join(["[[rule]]", *[f"{name} = {_shown(value)}" for name, value in rule.table().items()]])
            for rule in self.rules
        ]
        return "\n\n".join([*head, *tables, ""])

    def __len__(self) -> int:
        return len(self.rules)

    def __getitem__(self, at: Any) -> Any:
        return cast("Any", self.rules)[at]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)


def _rank(name: str, results: Sequence[Pattern]) -> int:
    found = (number for number, result in enumerate(results) if result.match(name) is not None)
    return next(found, len(results))


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal()


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple(["" if _is_number(key) else key for key in name.split(".")])


def parse_rules(document: Mapping[str, Any], path: str = "rules") -> Rules:
    """Return the rules of a file of TOML that was read.

    Args:
        document: Its tables.
        path: Of the file, for messages.

    Raises:
        SpecError: If a table is no rule; the message counts from 1 to it.
    """
    unknown = [name for name in document if name not in ("rule", "rest")]
    if unknown:
        raise SpecError(f"{path}: {unknown[0]!r} is not known; there are [[rule]] and rest")

    tables: object = document.get("rule", ())
    if not isinstance(tables, Sequence) or isinstance(tables, str):
        raise SpecError(f"{path}: a rule is a table [[rule]], with two brackets")

    rules: list[Rule] = []
    for number, table in enumerate(cast("Sequence[object]", tables), 1):
        try:
            rules.append(_rule_of(table))
        except SpecError as error:
            raise SpecError(f"{path}: [[rule]] {number}: {error}") from error

    rest: Any = document.get("rest", "error")
    return Rules(tuple(rules), rest=rest)


def _rule_of(table: object) -> Rule:
    if not isinstance(table, Mapping):
        raise SpecError(f"{table!r} is no table")

    given = {str(name): value for name, value in cast("Mapping[object, Any]", table).items()}
    named = [name for name in given if name in RULES]
    if len(named) != 1:
        problem = "says what is done" if not named else f"one of {' and '.join(named)} says what is done"
        hint = hint_at(next(iter(given), ""), list(RULES))
        raise SpecError(f"one key {problem}, such as rename; {hint}" if not named else problem)

    kind = RULES[named[0]]
    known = [one.name for one in fields(kind) if one.name != "source"]
    for name in given:
        if name != named[0] and name not in known:
            raise SpecError(f"{kind.operation} has no {name!r}; {hint_at(name, known)}")

    values = dict(given)
    source = values.pop(kind.operation)
    made: Any = kind
    rule: Rule = made(source, **{name: _frozen(value) for name, value in values.items()})
    return rule


def _frozen(value: object) -> object:
    return tuple(map(_frozen, cast("list[object]", value))) if isinstance(value, list) else value


def _plain(value: object) -> object:
    return [_plain(each) for each in cast("tuple[object, ...]", value)] if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    """Write a value as TOML does."""
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML, too

    return json.dumps(_plain(value), ensure_ascii=False)


def _tuple(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else cast("tuple[str, ...]", value)


def _names(operation: str, what: str, given: object, *, several: bool) -> str | tuple[str, ...]:
    if isinstance(given, str):
        pattern(given)
        return given

    names = tuple(cast("Sequence[object]", given)) if isinstance(given, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecError(f"rule {operation}: {what} is a pattern such as 'layers.{{i}}.kernel', not {given!r}")
    if not several:
        raise SpecError(f"rule {operation}: {what} is one pattern, not {len(names)}")

    for name in cast("tuple[str, ...]", names):
        pattern(name)

    return cast("tuple[str, ...]", names)


def _dtype(rule: Rule, what: str, given: Any) -> str:
    for one in (given, getattr(given, "dtype", None)):  # a name, a dtype, or a class of jax.numpy's
        name = one if isinstance(one, str) else getattr(one, "name", None)
        if isinstance(name, str) and name:
            return name
    if isinstance(given, type):
        return given.__name__

    raise rule.invalid(f"needs {what}, such as 'bfloat16', not {given!r}")


def _integers(rule: Rule, what: str, given: object) -> tuple[int, ...]:
    values = tuple(cast("Sequence[object]", given)) if isinstance(given, Sequence) else ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise rule.invalid(f"{what} is a list of integers, not {given!r}")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise rule.invalid(f"{what} has integers, not {list(values)}")

    return cast("tuple[int, ...]", values)


def _check_joined(rule: Rule, axis: int) -> None:
    _integers(rule, "axis", (axis,))
    if rule.to is None:
        raise rule.invalid("needs `to`: the name of its result")
    if len(rule.sources) < 2 and rule.over is None:
        raise rule.invalid("joins the leaves of several patterns, or over a number that is not in `to`")
    if any(one.is_loose for one in rule.sources):
        raise rule.invalid("names what it joins, without *")
