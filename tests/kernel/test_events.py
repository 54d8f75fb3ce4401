from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from penstock.kernel.events import get_logger

SRC = Path(__file__).parents[2] / "src"


def run(program: str) -> subprocess.CompletedProcess[str]:
    program = f"from penstock.kernel.events import get_logger\n{program}"
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=SRC, timeout=30
    )


EVENTS = """
log = get_logger(path="/tmp/step")
log.info("save.started", n_leaves=3)
log.warning("save.slow", waited_s=0.5)
try: 1 / 0
except ZeroDivisionError: log.exception("save.failed")
"""


def test_nothing_is_written_unless_somebody_asks() -> None:
    ended = run(EVENTS)

    assert (ended.stdout, ended.stderr) == ("", "")


def test_events_are_seen_where_logging_is_configured() -> None:
    ended = run(f"import logging; logging.basicConfig(level=logging.INFO)\n{EVENTS}")

    lines = ended.stderr.splitlines()
    assert lines[:4] == [
        "INFO:penstock:save.started path='/tmp/step' n_leaves=3",
        "WARNING:penstock:save.slow path='/tmp/step' waited_s=0.5",
        "ERROR:penstock:save.failed path='/tmp/step'",
        "Traceback (most recent call last):",
    ]
    assert lines[-1].startswith("ZeroDivisionError")
    assert ended.stdout == ""


def test_importing_configures_nothing_global() -> None:
    ended = run("import logging, structlog; print(structlog.is_configured(), logging.getLogger().handlers)")

    assert ended.stdout.split() == ["False", "[]"]


def test_fields_are_on_the_record_whatever_they_are_called(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    get_logger(path="/a").bind(n_leaves=2).debug(
        "save.staged", name="x", args=1, message="m", percent="100%d"
    )

    (record,) = caplog.records
    assert record.name == "penstock"
    assert record.levelno == logging.DEBUG
    assert vars(record)["penstock"] == {
        "event": "save.staged",
        "path": "/a",
        "n_leaves": 2,
        "name": "x",
        "args": 1,
        "message": "m",
        "percent": "100%d",
    }
    assert record.getMessage().startswith("save.staged path='/a' n_leaves=2 name='x'")


def test_an_event_below_the_level_costs_not_even_the_text_of_its_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Costly:
        def __repr__(self) -> str:
            raise AssertionError

    caplog.set_level(logging.WARNING, "penstock")
    get_logger().info("save.staged", value=Costly())

    assert caplog.records == []


def test_the_configuration_of_structlog_is_left_to_the_application(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    before = structlog.get_config()
    try:
        structlog.configure(processors=[], wrapper_class=structlog.make_filtering_bound_logger(50))
        get_logger().info("save.staged")
    finally:
        structlog.configure(**before)
        structlog.reset_defaults()

    assert [record.getMessage() for record in caplog.records] == ["save.staged"]


def test_a_formatter_of_json_gets_the_fields_of_every_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    get_logger().info("save.started", path="/a", nbytes=3, module="mine")

    (record,) = caplog.records
    assert (vars(record)["event"], vars(record)["path"], vars(record)["nbytes"]) == ("save.started", "/a", 3)
    assert vars(record)["module"] != "mine"  # that of `logging` stays
    assert vars(record)["penstock"]["module"] == "mine"


def test_a_host_that_writes_json_by_structlog_gets_events_with_their_fields() -> None:
    ended = run("""
import logging, structlog, sys
shared = [structlog.stdlib.ExtraAdder(), structlog.processors.format_exc_info]
structlog.configure(
    processors=[structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
)
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=shared,
    processors=[
        structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()
    ],
))
logging.basicConfig(handlers=[handler], level=logging.INFO)
get_logger(path="/a").info("save.finalized", nbytes=3)
structlog.get_logger("host").info("mine", x=1)
""")
    ours, host = map(json.loads, ended.stdout.splitlines())

    assert (ours["event"], ours["path"], ours["nbytes"]) == ("save.finalized", "/a", 3)
    assert host == {"event": "mine", "x": 1}


def test_a_json_renderer_alone_changes_nothing() -> None:
    ended = run("""
import logging, structlog, sys
structlog.configure(processors=[structlog.processors.JSONRenderer()])
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
get_logger(path="/a").info("save.finalized", nbytes=3)
structlog.get_logger().info("mine")
""")

    assert ended.stdout.splitlines() == [
        "INFO:penstock:save.finalized path='/a' nbytes=3",
        '{"event": "mine"}',
    ]
