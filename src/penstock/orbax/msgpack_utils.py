"""Trees of dicts, lists, numbers and arrays as msgpack, under the names of Orbax's module `msgpack_utils`.

Early Orbax and flax stored whole checkpoints so. A restore reads their files itself; this is for code that
calls these functions.

Source:
    The msgpack specification; ORBAX_FORMAT.md §1.9.
"""

from __future__ import annotations

__all__ = ("MAX_CHUNK_SIZE", "msgpack_restore", "msgpack_serialize")

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import jax
import msgpack
import numpy as np
import numpy.typing as npt

from penstock.embedding import CHUNKED, dtypes, prng_keys
from penstock.errors import SpecError

MAX_CHUNK_SIZE: Final = 2**30
"""Bytes beyond which an array in a dict is cut into several msgpack values, which have 4 GiB at most."""

_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4  # the extensions of flax, whose format this is
_msgpack: Any = msgpack


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    """Encode a tree.

    Args:
        pytree: Dicts, lists and tuples of numbers, strings, bytes, None and arrays.
        in_place: Whether dicts may be changed: their jax.Arrays become NumPy arrays, and large arrays dicts
            of their parts.

    Raises:
        ValueError: If it has something else.
    """
    try:
        return bytes(_msgpack.packb(_host(pytree, in_place), default=_packed, strict_types=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"the tree cannot be written as msgpack: {error}") from error


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """Decode what `msgpack_serialize` returned. Arrays are views of `encoded_pytree`, and read-only.

    Raises:
        ValueError: If it is not msgpack, or has something else.
    """
    try:
        return _joined(_msgpack.unpackb(encoded_pytree, ext_hook=_unpacked, raw=False))
    except (ValueError, KeyError, TypeError, _msgpack.UnpackException) as error:
        raise SpecError(f"this is no tree in msgpack: {type(error).__name__}: {error}") from error


def _host(value: Any, in_place: bool) -> Any:
    """Bring the arrays in dicts to the host, and cut the large ones."""
    if isinstance(value, dict):
        found = cast("Any", value)
        made = {key: _host(child, in_place) for key, child in found.items()}
        if not in_place:
            return made

        found.update(made)
        return found

    array = _array(value) if isinstance(value, jax.Array) else value
    if isinstance(array, np.ndarray) and array.nbytes > MAX_CHUNK_SIZE:
        return _cut(cast("npt.NDArray[Any]", array))

    return cast("Any", array)


def _cut(array: npt.NDArray[Any]) -> dict[str, Any]:
    step = max(1, MAX_CHUNK_SIZE // array.itemsize)
    flat = array.reshape(-1)
    parts = [flat[at : at + step] for at in range(0, flat.size, step)]
    return {CHUNKED: True, "shape": _numbered(array.shape), "chunks": _numbered(parts)}


def _joined(value: Any) -> Any:
    """Put arrays together that were cut."""
    if not isinstance(value, dict):
        return value

    found = cast("Any", value)
    if CHUNKED in found:
        shape, parts = (_in_order(found[name]) for name in ("shape", "chunks"))
        return np.concatenate(parts).reshape(shape)

    return {key: _joined(child) for key, child in found.items()}


def _numbered(values: Any) -> dict[str, Any]:
    return {str(at): value for at, value in enumerate(values)}


def _in_order(numbered: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(numbered[str(at)] for at in range(len(numbered)))


def _packed(value: Any) -> Any:
    """Encode what msgpack itself does not know."""
    if isinstance(value, np.ndarray | jax.Array):
        return _msgpack.ExtType(_ARRAY, _bytes_of(_array(value)))
    if isinstance(value, np.generic):
        return _msgpack.ExtType(_SCALAR, _bytes_of(np.asarray(cast("Any", value))))
    if isinstance(value, complex):
        return _msgpack.ExtType(_COMPLEX, _msgpack.packb((value.real, value.imag)))
    if isinstance(value, tuple):
        items: list[Any] = [*cast("Any", value)]
        return _msgpack.ExtType(_TUPLE, _msgpack.packb(items, default=_packed, strict_types=True))

    raise SpecError(f"{type(value)} has no place in msgpack: {value!r}"[:400])


def _unpacked(code: int, data: bytes) -> Any:
    if code in (_ARRAY, _SCALAR):
        shape, name, content = _msgpack.unpackb(data, raw=True)
        array = np.frombuffer(content, dtype=dtypes.numpy_dtype(name.decode())).reshape(shape)
        return array if code == _ARRAY else array[()]
    if code == _COMPLEX:
        return complex(*_msgpack.unpackb(data))
    if code == _TUPLE:
        return tuple(_msgpack.unpackb(data, ext_hook=_unpacked, raw=False))

    raise SpecError(f"msgpack extension {code} is not one of those of flax")


def _array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, jax.Array) and prng_keys.is_key(value.dtype):
        raise SpecError("a typed PRNG key has no place in msgpack: take jax.random.key_data of it")

    return np.asarray(value)


def _bytes_of(array: npt.NDArray[Any]) -> bytes:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise SpecError(f"arrays of {array.dtype} have no place in msgpack")

    pack = partial(_msgpack.packb, use_bin_type=True)
    return bytes(pack((array.shape, array.dtype.name, array.tobytes("C"))))
