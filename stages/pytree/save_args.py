"""What is asked for each leaf: by one `SaveArgs` for all, a prefix of the tree, or a function."""

from __future__ import annotations

__all__ = ("each_leaf",)

from collections.abc import Callable, Sequence
from typing import cast

from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import HandlerFailedError, InvalidLeafError, SpecError
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.stages.pytree.flattening import flatten_tree, is_empty


def each_leaf(asked: object, infos: Sequence[ParamInfo]) -> Sequence[SaveArgs | None]:
    """Find the `SaveArgs` of each leaf.

    Args:
        asked: None; a `SaveArgs`; a function from a stored key path to one or None; or a tree of them,
            each of which is for every leaf at or below its place. None in a tree asks for nothing.
        infos: Where the leaves stand.

    Returns:
        One for each leaf, or nothing if nothing is asked for any.

    Raises:
        SpecError: If it is none of these, or a place in a tree is not in the tree that is saved.
        HandlerFailedError: If the function raises; its error is the cause.
    """
    if asked is None:
        return ()
    if isinstance(asked, SaveArgs):
        return [asked] * len(infos)
    if callable(asked):
        function = cast("Callable[[KeyPath], object]", asked)
        return [_answer(function, info) for info in infos]

    return _by_prefix(asked, infos)


def _by_prefix(tree: object, infos: Sequence[ParamInfo]) -> Sequence[SaveArgs | None]:
    given = {
        found.info.keys: (_checked(found.value, found.info.key_path), found.info.key_path)
        for found in flatten_tree(tree)[0]
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
        raise InvalidLeafError(unused, "save_args has this, and the tree to be saved has nothing there")

    return result


def _answer(function: Callable[[KeyPath], object], info: ParamInfo) -> SaveArgs | None:
    try:
        answer = function(info.keys)
    except SpecError as error:  # it asks for what no leaf can have
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
