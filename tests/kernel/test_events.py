from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernel import get_logger

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


def test_a_host_that_configured_structlog_gets_events_by_it_alone() -> None:
    ended = run("""
import logging, structlog, sys
early = get_logger(path="/a")
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()])
early.info("save.finalized", nbytes=3, name="x")
get_logger().warning("step.not_deleted", step=1, logger="its own")
structlog.get_logger().info("mine")
""")

    assert list(map(json.loads, ended.stdout.splitlines())) == [
        {
            "event": "save.finalized",
            "level": "info",
            "logger": "penstock",
            "path": "/a",
            "nbytes": 3,
            "name": "x",
        },
        {"event": "step.not_deleted", "level": "warning", "logger": "its own", "step": 1},
        {"event": "mine", "level": "info"},
    ]
    assert ended.stderr == ""


def test_a_traceback_reaches_the_host_s_processors() -> None:
    ended = run("""
import structlog
structlog.configure(processors=[structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()])
try: 1 / 0
except ZeroDivisionError: get_logger().exception("save.failed")
""")

    (line,) = map(json.loads, ended.stdout.splitlines())
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_json_that_structlog_sends_through_logging_is_written_once() -> None:
    ended = run("""
import logging, structlog, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level, structlog.stdlib.add_logger_name,
        structlog.processors.JSONRenderer(),
    ],
    logger_factory=structlog.stdlib.LoggerFactory(), wrapper_class=structlog.stdlib.BoundLogger,
)
get_logger(path="/a").info("save.finalized", nbytes=3)
get_logger(path="/a").debug("save.staged")
""")

    (line,) = map(json.loads, ended.stdout.splitlines())
    assert line == {"event": "save.finalized", "logger": "penstock", "path": "/a", "nbytes": 3}


def test_levels_hold_for_structlog_too() -> None:
    ended = run("""
import logging, structlog
structlog.configure(
    processors=[structlog.processors.JSONRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
)
log = get_logger()
log.debug("too low for structlog")
log.info("first")
logging.getLogger("penstock").setLevel(logging.WARNING)
log.info("too low for penstock")
log.warning("second")
""")

    assert [json.loads(line)["event"] for line in ended.stdout.splitlines()] == ["first", "second"]


HOSTS_THAT_CANNOT = {
    "processors that raise": "processors=[lambda *_: 1 / 0]",
    "a logger without levels": "wrapper_class=structlog.BoundLoggerBase",
    "loggers that are awaited": "wrapper_class=structlog.stdlib.AsyncBoundLogger",
}


@pytest.mark.parametrize("options", HOSTS_THAT_CANNOT.values(), ids=HOSTS_THAT_CANNOT)
def test_what_structlog_cannot_take_goes_to_logging(options: str) -> None:
    ended = run(f"""
import logging, structlog
logging.basicConfig(level=logging.INFO)
structlog.configure({options})
get_logger().info("save.finalized", nbytes=3)
""")

    (line,) = ended.stderr.splitlines()
    assert line.startswith("INFO:penstock:save.finalized nbytes=3")
    assert ended.stdout == ""


def test_logging_that_is_configured_later_gets_what_comes_then() -> None:
    ended = run("""
import logging, structlog
log = get_logger(path="/a")
log.info("save.started")
logging.basicConfig(level=logging.INFO)
log.info("save.finalized")
structlog.configure(processors=[structlog.processors.JSONRenderer()])
log.info("save.started")
structlog.reset_defaults()
log.info("save.failed")
""")

    assert ended.stderr.splitlines() == [
        "INFO:penstock:save.finalized path='/a'",
        "INFO:penstock:save.failed path='/a'",
    ]
    assert json.loads(ended.stdout) == {"event": "save.started", "logger": "penstock", "path": "/a"}


def test_a_save_is_told_by_the_host_s_structlog_with_its_context(tmp_path: Path) -> None:
    ended = run(f"""
import numpy as np, penstock, structlog
structlog.configure(
    processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()]
)
structlog.contextvars.bind_contextvars(run="a")
penstock.sync.save({str(tmp_path / "step")!r}, {{"w": np.zeros(4)}})
""")

    lines = {line["event"]: line for line in map(json.loads, ended.stdout.splitlines())}
    finalized = lines["save.finalized"]
    assert (finalized["n_leaves"], finalized["nbytes"], finalized["run"]) == (1, 32, "a")
    assert len(lines) == len(ended.stdout.splitlines())
