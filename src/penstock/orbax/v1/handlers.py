"""Handlers of checkpointables, and their registries."""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointable",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "JsonHandler",
    "ProtoHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "global_registry",
    "local_registry",
    "register_handler",
)

import json
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Final, final

from penstock import kernel
from penstock.orbax.item_files import find_text, write_text
from penstock.orbax.multihost import is_primary_host
from penstock.orbax.v1.handler_registration import (
    METRICS,
    STATE,
    AbstractCheckpointable,
    AlreadyExistsError,
    Checkpointable,
    CheckpointableHandler,
    CheckpointableHandlerRegistry,
    StatefulCheckpointable,
    global_registry,
    local_registry,
    register_handler,
)
from penstock.orbax.v1.options import get_context
from penstock.orbax.v1.path import Path, PathAwaitingCreation
from penstock.orbax.v1.pytree_handler import PyTreeHandler

_ORBAX: Final = "orbax.checkpoint.experimental.v1._src.handlers"


class JsonHandler:
    """Saves and loads what JSON can hold.

    Args:
        filename: By default `data.json`; files under older names are also read.
    """

    RECORDED_AS = f"{_ORBAX}.json_handler.JsonHandler"

    def __init__(self, filename: str | None = None) -> None:
        self._names = [filename or "data.json", "data.json", "metadata"]

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        return _write(
            directory, self._names[0], json.dumps(checkpointable), get_context().multiprocessing.primary_host
        )

    async def load(self, directory: Path, abstract_checkpointable: None = None) -> Awaitable[Any]:
        return self._read(str(directory))

    async def metadata(self, directory: Path) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError, RecursionError):
            return False

        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None

    async def _read(self, directory: str) -> Any:
        return json.loads(await _text_in(directory, self._names))


@final
class MetricsHandler(JsonHandler):
    """Saves and loads metrics, as JSON."""

    RECORDED_AS = f"{_ORBAX}.json_handler.MetricsHandler"

    def __init__(self) -> None:
        super().__init__(filename=METRICS)


@final
class ProtoHandler:
    """Saves and loads protobuf messages, as text. Needs protobuf: `pip install penstock[proto]`.

    Args:
        filename: Of the text.
    """

    RECORDED_AS: Final = f"{_ORBAX}.proto_handler.ProtoHandler"

    def __init__(self, filename: str = "proto.pbtxt") -> None:
        self._filename = filename

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        from google.protobuf import text_format

        text: str = text_format.MessageToString(checkpointable)
        return _writing(directory, self._filename, text)

    async def load(self, directory: Path, abstract_checkpointable: type[Any] | None = None) -> Awaitable[Any]:
        """Begin to load a message of a given class.

        Raises:
            ValueError: If no class is given: the class is not recorded.
        """
        if abstract_checkpointable is None:
            raise ValueError("abstract_checkpointable must be provided to restore as a Proto.")

        return self._read(str(directory), abstract_checkpointable)

    async def metadata(self, directory: Path) -> type[Any]:
        raise NotImplementedError("the class of a message is not recorded")

    def is_handleable(self, checkpointable: Any) -> bool:
        return _is_message(checkpointable.__class__)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, type) and _is_message(abstract_checkpointable)

    async def _read(self, directory: str, kind: type[Any]) -> Any:
        from google.protobuf import text_format

        return text_format.Parse(await _text_in(directory, [self._filename]), kind())


@final
class StatefulCheckpointableHandler:
    """Lets objects save and load themselves."""

    RECORDED_AS: Final = f"{_ORBAX}.stateful_checkpointable_handler.StatefulCheckpointableHandler"

    async def save(
        self, directory: PathAwaitingCreation, checkpointable: StatefulCheckpointable
    ) -> Awaitable[None]:
        return await checkpointable.save(directory)

    async def load(
        self, directory: Path, abstract_checkpointable: StatefulCheckpointable | None = None
    ) -> Awaitable[StatefulCheckpointable]:
        """Begin to load an object in place.

        Raises:
            ValueError: If there is no object.
        """
        if abstract_checkpointable is None:
            raise ValueError(
                "To restore a `StatefulCheckpointable`, you must pass an instance of the object."
            )

        return _loaded(abstract_checkpointable, await abstract_checkpointable.load(directory))

    async def metadata(self, directory: Path) -> StatefulCheckpointable:
        raise NotImplementedError("an object that saves itself cannot be described without loading it")

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, StatefulCheckpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, StatefulCheckpointable)


async def _loaded(target: StatefulCheckpointable, loading: Awaitable[None]) -> StatefulCheckpointable:
    await loading
    return target


def _writing(directory: PathAwaitingCreation, name: str, text: str) -> Awaitable[None]:
    return _write(directory, name, text, get_context().multiprocessing.primary_host)


async def _write(directory: PathAwaitingCreation, name: str, text: str, primary_host: int | None) -> None:
    path = await directory.await_creation()
    if is_primary_host(primary_host):  # all processes have the same text
        await write_text(path, name, text)


async def _text_in(directory: str, names: Sequence[str]) -> str:
    text = await kernel.Threads(1).run(find_text, directory, names)
    if text is None:
        raise FileNotFoundError(f"there is none of the files {list(names)} in {directory}")

    return text


def _is_message(kind: type[Any]) -> bool:
    """Return whether a class is a protobuf message; protobuf need not be installed."""
    return any(base.__module__ == "google.protobuf.message" for base in kind.__mro__)


_OLDER: Final = ("orbax.checkpoint._src.handlers.", "orbax.checkpoint.v0._src.handlers.")


def _older(*names: str) -> list[str]:
    return [prefix + name for name in names for prefix in _OLDER]


def _register(handler: type[Any], name: str | None = None, recorded: Sequence[str] | None = None) -> None:
    with suppress(AlreadyExistsError):  # this module may be loaded anew
        register_handler(handler, checkpointable_name=name, secondary_typestrs=recorded)


# The order counts: of those that can handle an object the last one does.
_register(ProtoHandler, recorded=_older("proto_checkpoint_handler.ProtoCheckpointHandler"))
_register(JsonHandler, recorded=_older("json_checkpoint_handler.JsonCheckpointHandler"))
_register(StatefulCheckpointableHandler)
_register(MetricsHandler, METRICS)
_register(
    PyTreeHandler,
    recorded=_older(
        "pytree_checkpoint_handler.PyTreeCheckpointHandler",
        "standard_checkpoint_handler.StandardCheckpointHandler",
    ),
)
_register(PyTreeHandler, STATE)
