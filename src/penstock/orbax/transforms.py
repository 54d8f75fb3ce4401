"""Where the leaves of a restored tree come from, if not from leaves of the same name: Orbax's rules."""

from __future__ import annotations

__all__ = ("RestoreTransform", "Transform")

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.orbax.leaf_args import RestoreArgs


@dataclass
class Transform:
    r"""Says where a leaf comes from. The rule's own key, a regular expression, says which leaves.

    Attributes:
        original_key: The leaf's key in the original tree, as a tuple or joined by slashes; may refer to
            groups of the rule's key (`\1`). By default its own.
        use_fallback: Take the value of the new tree; if the default is the new tree's, the original one.
        value_fn: Makes the value of the original one.
        multi_value_fn: Makes the value of the whole original tree.

    Raises:
        AssertionError: If these contradict each other.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclass
class RestoreTransform(Transform):
    """A `Transform` for leaves that are being restored.

    Attributes:
        multi_value_fn_input_args: The leaves that `multi_value_fn` needs: regular expression over keys
            -> how such a leaf is to be restored.
    """

    multi_value_fn: Callable[[str, Any, RestoreArgs], Any] | None = None
    multi_value_fn_input_args: Mapping[str, RestoreArgs] | None = None
