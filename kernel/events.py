"""Structured events on the standard logger `penstock`.

Event names are `<what>.<happened>`: `save.started`, `save.staged`, `save.finalized`, `save.failed`,
`restore.finished`. Fields carry their unit in their name, as everywhere: `nbytes`, `staged_s`.

Nothing is written unless the application configures `logging`. A record's text is the event with
its fields. The fields by themselves are attributes of the record, as handlers and formatters expect it
(`extra`), and all of them together are its attribute `penstock`.
"""

from __future__ import annotations

__all__ = (
    "LOGGER_NAME",
    "get_logger",
)

import logging
from typing import Any, cast

import structlog
from structlog.typing import EventDict

LOGGER_NAME = "penstock"

# Without a handler of its own the logger would fall back to writing warnings to stderr.
logging.getLogger(LOGGER_NAME).addHandler(logging.NullHandler())

_OF_RECORDS = {*vars(logging.makeLogRecord({})), "message", "asctime"}
_PASSED_ON = ("exc_info", "stack_info", "stacklevel")


def get_logger(**fields: object) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger over the standard logger `penstock`.

    An event below the level of that logger costs about two microseconds. Neither structlog's
    configuration nor that of `logging` is touched or consulted, but for the level.

    Args:
        fields: Bound to every event.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(LOGGER_NAME),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return cast("structlog.stdlib.BoundLogger", logger.bind(**fields))


def _to_record(_: object, __: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    options = {name: event.pop(name) for name in _PASSED_ON if name in event}
    name = event.pop("event")
    text = " ".join([str(name), *(f"{field}={value!r}" for field, value in event.items())])
    fields = {"event": name, **event}
    # `logging` refuses fields that share a name with its own: these are only under the one attribute.
    extra = {field: value for field, value in fields.items() if field not in _OF_RECORDS}
    return (text,), {**options, "extra": {**extra, LOGGER_NAME: fields}}
