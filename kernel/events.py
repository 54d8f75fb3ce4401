"""Structured events, by the application's structlog or on the standard logger `penstock`.

Event names are `<what>.<happened>`: `save.started`, `save.staged`, `save.finalized`, `save.failed`,
`restore.finished`. Fields carry their unit in their name, as everywhere: `nbytes`, `staged_s`.

An application that has called `structlog.configure` gets events as those of its own loggers, through its
processors, and nowhere else. For any other, nothing is written unless it configures `logging`. A record's
text is the event with its fields. The fields by themselves are attributes of the record, as handlers and
formatters expect it (`extra`), and all of them together are its attribute `penstock`.
"""

from __future__ import annotations

__all__ = (
    "LOGGER_NAME",
    "get_logger",
)

import logging
from inspect import iscoroutinefunction
from typing import Any, cast

import structlog
from structlog.typing import EventDict

LOGGER_NAME = "penstock"

# Without its own handler the logger would fall back to writing warnings to stderr.
logging.getLogger(LOGGER_NAME).addHandler(logging.NullHandler())

_OF_RECORDS = {*vars(logging.makeLogRecord({})), "message", "asctime"}
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}
_PASSED_ON = ("exc_info", "stack_info", "stacklevel")


def get_logger(**fields: object) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger whose events go where the application wants them.

    That is decided at each event, so `structlog.configure` and `logging` may be called before or after.
    Neither is configured here. The level of the standard logger `penstock` holds in both cases, and with
    structlog that which its `wrapper_class` has, too. An event below it costs about two microseconds.

    Args:
        fields: Bound to every event.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(LOGGER_NAME),
        processors=[_to_structlog, structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return cast("structlog.stdlib.BoundLogger", logger.bind(**fields))


def _to_structlog(logger: Any, method_name: str, event: EventDict) -> EventDict:
    """Hand the event to the application's structlog, if it has configured one, and end its way here."""
    if not structlog.is_configured() or _is_async(method_name):
        return event

    # The level that was set for penstock itself. That of the root logger is not structlog's concern.
    if _LEVELS.get(method_name, logging.CRITICAL) >= logger.level:
        fields = {"logger": LOGGER_NAME, **event}
        name = fields.pop("event")
        try:
            getattr(structlog.get_logger(LOGGER_NAME), method_name)(name, **fields)
        except Exception as error:
            # Processors are the application's. What they raise fails no save: the event goes to `logging`.
            return {**event, "structlog_error": repr(error)}

    raise structlog.DropEvent


def _is_async(method_name: str) -> bool:
    """True if the application's loggers must be awaited, which those who log here cannot do."""
    return iscoroutinefunction(getattr(structlog.get_config()["wrapper_class"], method_name, None))


def _to_record(_: object, __: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    options = {name: event.pop(name) for name in _PASSED_ON if name in event}
    name = event.pop("event")
    text = " ".join([str(name), *(f"{field}={value!r}" for field, value in event.items())])
    fields = {"event": name, **event}
    # `logging` refuses fields that share a name with its own: these are only under the one attribute.
    extra = {field: value for field, value in fields.items() if field not in _OF_RECORDS}
    return (text,), {**options, "extra": {**extra, LOGGER_NAME: fields}}
