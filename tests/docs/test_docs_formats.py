"""The table and the configuration of docs/howto/choose-a-format.md are those of `SaveFormat`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from penstock import SaveFormat
from penstock.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "choose-a-format.md"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_configuration_of_the_page_is_read(tmp_path: Path) -> None:
    (text,) = examples("toml")
    assert tomllib.loads(text)
    (tmp_path / "x.toml").write_text(text)
    assert Config.load(tmp_path / "x.toml", environ={}).format == SaveFormat(
        codec="zstd", chunk_byte_size=16 << 20
    )


def test_every_option_is_in_the_table() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [field.name for field in fields(SaveFormat)]
