"""Finds the `SaveArgs` of each leaf: from one for all leaves, a prefix tree, or a function."""

from __future__ import annotations

__all__ = ("each_leaf",)

from collections.abc import Callable, Sequence
from typing import cast

from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import HandlerFailedError, InvalidLeafError, SpecError
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.stages.pytree.flattening import ALONE, flatten_tree, is_empty
from penstock.stages.pytree.structure_cache import check_levels


def each_leaf(
    asked: object, infos: Sequence[ParamInfo], process: tuple[int, int] = ALONE
) -> Sequence[SaveArgs | None]:
    """Find the `SaveArgs` of each leaf.

    Args:
        asked: None; one `SaveArgs` for all leaves; a function from a stored key path to a `SaveArgs` or
            None; or a prefix tree of them, in which each one applies to every leaf at or below its place.
            None asks for nothing special.
        infos: The infos of the leaves.
        process: The index of this process and how many there are, for what each has for itself.

    Returns:
        One entry for each leaf; empty if `asked` is None.

    Raises:
        SpecError: If `asked` is none of these.
        InvalidLeafError: If the function or the prefix tree gives something else for a leaf, or asks for
            what no leaf can have, or if the prefix tree has a place that the saved tree lacks.
        HandlerFailedError: If the function raises; its error is the cause.
    """
    if asked is None:
        return ()
    if isinstance(asked, SaveArgs):
        return [asked] * len(infos)
    if callable(asked):
        function = cast("Callable[[KeyPath], object]", asked)
        return [_answer(function, info) for info in infos]

    return _by_prefix(asked, infos, process)


def _by_prefix(
    tree: object, infos: Sequence[ParamInfo], process: tuple[int, int]
) -> Sequence[SaveArgs | None]:
    check_levels(tree)
    given = {
        found.info.keys: (_checked(found.value, found.info.key_path), found.info.key_path)
        for found in flatten_tree(tree, process=process)[0]
    }
    used: set[KeyPath] = set()
    result: list[SaveArgs | None] = []
    for info in infos:
        keys = info.keys
        place = next((keys[:n] for n in range(len(keys), -1, -1) if keys[:n] in given), None)
        if place is None:
            result.append(None)
            continue

        used.add(place)
        result.append(given[place][0])

    unused = next((path for keys, (args, path) in given.items() if keys not in used and args), None)
    if unused is not None:
        raise InvalidLeafError(unused, "save_args has an entry here, but the tree has no leaf at this place")

    return result


def _answer(function: Callable[[KeyPath], object], info: ParamInfo) -> SaveArgs | None:
    try:
        answer = function(info.keys)
    except SpecError as error:  # it made an invalid SaveArgs
        raise InvalidLeafError(info.key_path, f"save_args: {error}") from error
    except Exception as error:
        name = str(getattr(function, "__qualname__", function))
        raise HandlerFailedError(info.key_path, f"save_args={name}", repr(error)) from error

    return _checked(answer, info.key_path)


def _checked(value: object, key_path: str) -> SaveArgs | None:
    if is_empty(value):
        return None
    if isinstance(value, SaveArgs):
        return value

    problem = f"must be a SaveArgs or None, not {value!r}"
    raise (
        InvalidLeafError(key_path, f"save_args here {problem}")
        if key_path
        else SpecError(f"save_args {problem}")
    )
