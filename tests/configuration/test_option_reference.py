"""The reference has every key, and the page and the schema in docs/reference are what it says now."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import SaveFormat
from penstock.config import Config, TierOptions
from penstock.config.option_reference import STAGES, config_page, config_schema, every_option
from penstock.handlers import OrbaxLayout
from penstock.pipelines import fitting_pipeline, restore_pipeline, save_pipeline

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
BY_KEY = {entry.key: entry for entry in every_option()}


def test_the_page_and_the_schema_are_what_the_code_says() -> None:
    """Made by `penstock config reference --markdown` and `--schema`."""
    assert (REFERENCE / "configuration.md").read_text() == config_page()
    assert json.loads((REFERENCE / "penstock.schema.json").read_text()) == config_schema()


def test_every_key_says_what_it_does() -> None:
    assert len(BY_KEY) > 80
    assert [key for key, entry in BY_KEY.items() if len(entry.effect) < 10 or not entry.type] == []


def test_every_option_of_every_stage_is_there() -> None:
    saving = fitting_pipeline(save_pipeline(), OrbaxLayout(SaveFormat(codec="auto")))
    for flow, pipeline in (("save", saving), ("restore", restore_pipeline())):
        assert set(STAGES[flow]) == set(pipeline.names)
        for slot in pipeline:
            stage: Any = slot.stage
            assert type(stage).__name__ == STAGES[flow][slot.name]
            for field in dataclasses.fields(stage):
                entry = BY_KEY[f"{flow}.{slot.name}.{field.name}"]
                assert entry.positive == field.metadata.get("positive", False)


def test_types_units_and_defaults_are_those_of_the_code() -> None:
    shown = {key: (entry.type, entry.unit, entry.default) for key, entry in BY_KEY.items()}

    assert shown["memory.limit_bytes"] == ('whole number or "auto"', "bytes", '"auto"')
    assert shown["save.batch_bytes"] == ("whole number", "bytes", '"4GiB"')
    assert shown["stopping.read_s"] == ("number", "seconds", "2.0")
    assert shown["format.zarr"] == ("2 or 3", "", "2")
    assert shown["loop.pause_collector"] == ("true or false", "", "true")
    assert shown["save.stages"] == ("list of texts", "", "(none)")
    assert shown["save.write.concurrency"] == ("whole number", "", "4")
    assert shown["restore.plan.max_expansion"] == ("whole number", "", "1000")
    assert shown["restore.read.concurrency"] == ("whole number", "", "(depends on the machine)")
    assert shown["store.gs.billed_project"] == ("text", "", "(none)")
    assert "store.s3.checksum" in shown


def test_every_default_is_accepted_by_the_configuration(tmp_path: Path) -> None:
    lines: list[str] = []
    for section, heading in {entry.section: entry.heading for entry in BY_KEY.values()}.items():
        lines += [heading, *(['path = "/near"'] if heading == "[[tier]]" else [])]
        lines += [
            f"{entry.name} = {entry.default}"
            for entry in BY_KEY.values()
            if entry.section == section and not entry.default.startswith("(")
        ]

    (tmp_path / "penstock.toml").write_text("\n".join(lines))
    found = Config.load(tmp_path / "penstock.toml", environ={})
    assert found.tier == (TierOptions(path="/near"),)
    assert dataclasses.replace(found, save=Config().save, restore=Config().restore, tier=()) == Config()


VALID: list[Any] = [
    {"memory": {"limit_bytes": "2GiB"}, "save": {"write": {"concurrency": 3}, "mine": {"a": 1}}},
    {"profiles": {"tpu-pod": {"memory": {"limit_bytes": "auto"}}}},
    {"store": {"s3": {"request_s": "2min", "checksum": "none"}}},
    {"tier": [{"kind": "memory", "limit_bytes": "64GiB"}, {"path": "/near", "keep_last": 3}]},
]
INVALID: list[Any] = [
    {"memory": {"limit": 1}},
    {"memory": {"limit_bytes": "2 gigs"}},
    {"memory": {"limit_bytes": 0}},
    {"profiles": {"x": {"memory": {"limit": 1}}}},
    {"save": {"write": {"concurency": 3}}},
    {"format": {"zarr": 4}},
    {"store": {"io": "fast"}},
    {"tier": {"path": "/near"}},
    {"tier": [{"pth": "/near"}]},
    {"profiles": {"x": {"tier": [{"keep_last": 0}]}}},
]


@pytest.mark.parametrize("document", VALID + INVALID, ids=str)
def test_an_editor_is_told_what_is_wrong(document: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    errors = list(jsonschema.Draft202012Validator(config_schema()).iter_errors(document))
    assert bool(errors) == (document in INVALID)


def test_patterns_of_quantities_are_those_of_the_units() -> None:
    pattern = config_schema()["properties"]["memory"]["properties"]["save_concurrent_bytes"]["anyOf"][1]
    assert re.match(pattern["pattern"], "1.5GiB")
    assert not re.match(pattern["pattern"], "1.5 gigs")
