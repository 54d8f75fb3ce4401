"""jax.distributed's coordination service, the one place that knows jax's private client."""

from __future__ import annotations

__all__ = ("JaxKeyValues",)

from collections.abc import Mapping
from typing import Any, Final, NoReturn, Protocol, cast, final

from penstock.kernel.errors import CoordinationError

NEEDED: Final = (
    "blocking_key_value_get_bytes",
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_increment",
    "key_value_set_bytes",
    "key_value_try_get_bytes",
)


class _Client(Protocol):
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def key_value_delete(self, key: str) -> None: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...
    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get_bytes(self, key: str) -> bytes: ...


_WHERE: Final = "it runs in process 0 of the job, which has ended or cannot be reached"


@final
class JaxKeyValues:
    """The `KeyValues` of a job that `jax.distributed.initialize` joined.

    Args:
        client: That of the service; by default the one of this process. It was tried with jax 0.10.2 and
            0.12.0.1.

    Raises:
        CoordinationError: If jax.distributed is not initialised, or this jax has another client.
    """

    __slots__ = ("_client",)

    def __init__(self, client: object = None) -> None:
        found = _client_of_jax() if client is None else client
        absent = [name for name in NEEDED if not hasattr(found, name)]
        if absent:
            raise CoordinationError(f"the client of this jax has no {', '.join(absent)}; {_advice()}")

        self._client = cast("_Client", found)

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """See `KeyValues.put`."""
        try:
            self._client.key_value_set_bytes(key, value, allow_overwrite=replace)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False

            _fail("set", key, error)

        return True

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """See `KeyValues.wait`."""
        try:
            if timeout_s <= 0:
                return self._client.key_value_try_get_bytes(key)

            return self._client.blocking_key_value_get_bytes(key, max(int(timeout_s * 1000), 1))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None

            _fail("get", key, error)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        try:
            found = self._client.key_value_dir_get_bytes(prefix)
        except Exception as error:
            _fail("list", prefix, error)

        return {key.removeprefix(prefix): value for key, value in found}

    def count(self, key: str, /) -> int:
        """See `KeyValues.count`."""
        try:
            return self._client.key_value_increment(key, 1)
        except Exception as error:
            _fail("increment", key, error)

    def delete(self, prefix: str, /) -> None:
        """See `KeyValues.delete`."""
        try:
            self._client.key_value_delete(prefix)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                _fail("delete", prefix, error)


def _client_of_jax() -> object:
    try:
        from jax._src import distributed  # pyright: ignore[reportPrivateUsage]
    except ImportError as error:
        raise CoordinationError(f"this jax has no `jax._src.distributed`; {_advice()}") from error

    state: Any = getattr(distributed, "global_state", None)
    client: object = getattr(state, "client", None)
    if client is None:
        raise CoordinationError(
            "jax.distributed is not initialised: call jax.distributed.initialize() in every process first"
        )

    return client


def _advice() -> str:
    import jax

    return f"jax {jax.__version__} is not supported for several processes, 0.10.2 and 0.12.0.1 are"


def _fail(operation: str, key: str, error: Exception) -> NoReturn:
    text = str(error)
    where = f"; {_WHERE}" if "UNAVAILABLE" in text else ""
    raise CoordinationError(
        f"the coordination service refused to {operation} {key!r}: {text}{where}"
    ) from error
