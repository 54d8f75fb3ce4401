from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.config import Config, MemoryOptions, StoreOptions
from penstock.config.config import RestoreFlowOptions, SaveFlowOptions
from penstock.errors import ConfigError
from penstock.kernel.options import load_options, parse_bytes, parse_seconds

MIB = 2**20


@dataclass(frozen=True)
class Options:
    concurrency: int = field(default=2, metadata={"positive": True})
    piece_bytes: int = field(default=MIB, metadata={"positive": True})
    spare_bytes: int = 0
    timeout_s: float = 1.0
    whole_s: int = 1
    ratio: float = 0.5
    verify: bool = True
    name: str = "x"
    mode: Literal["fast", "safe"] = "fast"
    level: Literal[0, 1] = 0
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] | None = None
    first: Callable[[str], bool] | tuple[str, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Required:
    path: str


def load(**arguments: object) -> Options:
    return load_options(Options, section="save.write", arguments=arguments)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("64MiB", 64 * MIB),
        (" 64 MiB ", 64 * MIB),
        ("64MB", 64_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("0.3B", 0),
        ("9007199254740993", 2**53 + 1),  # more digits than a float holds
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "1 Mb", "1mib", "1Mi", "-1", "-1MiB", "1e6", "1,5MiB", "nan", "inf", "1MiB2", "5s", "\u0661"],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes; write 1048576"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("5s", 5.0),
        ("2min", 120.0),
        ("1.5h", 5400.0),
        ("20us", 2e-5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5m", "5 sec", "-5s", "nan", "inf", "5MiB"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of seconds; write 0\.5"):
        parse_seconds(text)


@pytest.mark.parametrize("name", ["PENSTOCK_TRACEBACK", "PENSTOCK_PUBLIC_DEVICE_PUT"])
def test_a_variable_that_is_read_elsewhere_is_no_unknown_option(name: str) -> None:
    assert Config.load(environ={name: "1", "PENSTOCK_CONFIG": ""}) == Config.load(
        environ={"PENSTOCK_CONFIG": ""}
    )


def test_without_anything_given_the_defaults_stand() -> None:
    assert load_options(Options) == Options()


@pytest.mark.parametrize(
    ("name", "value", "loaded"),
    [
        ("concurrency", 4, 4),
        ("piece_bytes", 4, 4),
        ("piece_bytes", "2MiB", 2 * MIB),
        ("spare_bytes", 0, 0),
        ("timeout_s", 2, 2.0),
        ("timeout_s", 0.25, 0.25),
        ("timeout_s", "250ms", 0.25),
        ("whole_s", "2min", 120),
        ("ratio", 1, 1.0),
        ("ratio", -1.5, -1.5),
        ("verify", False, False),
        ("mode", "safe", "safe"),
        ("names", ["a", "b"], ("a", "b")),
        ("names", (), ()),
        ("sizes", [1, 2], (1, 2)),
        ("sizes", None, None),
        ("first", str.isupper, str.isupper),
        ("first", ["a.*"], ("a.*",)),
        ("labels", {"a": 1, "b": 2}, {"a": 1, "b": 2}),
    ],
)
def test_an_option_that_fits(name: str, value: object, loaded: object) -> None:
    found = getattr(load(**{name: value}), name)

    assert found == loaded
    assert type(found) is type(loaded)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("concurrency", "4", "must be a whole number, not '4'"),
        ("concurrency", 4.0, "must be a whole number, not 4.0"),
        ("concurrency", True, "must be a whole number, not True"),
        ("concurrency", None, "must be a whole number, not None"),
        ("concurrency", {"a": 1}, "must be a whole number, not {'a': 1}"),
        ("concurrency", 0, "must be positive, not 0"),
        ("concurrency", -1, "must be positive, not -1"),
        ("piece_bytes", "0MiB", "must be positive, not 0"),
        ("piece_bytes", "2Mib", "'2Mib' is not a number of bytes"),
        ("piece_bytes", "2s", "'2s' is not a number of bytes"),
        ("piece_bytes", 1e6, "must be a whole number, not 1000000.0"),
        ("spare_bytes", -1, "must not be negative: -1"),
        ("timeout_s", -0.5, "must not be negative: -0.5"),
        ("timeout_s", math.nan, "must be finite, not nan"),
        ("timeout_s", math.inf, "must be finite, not inf"),
        ("timeout_s", "2MiB", "'2MiB' is not a number of seconds"),
        ("timeout_s", True, "must be a number, not True"),
        ("whole_s", "500ms", "must be whole seconds, not '500ms'"),
        ("ratio", math.nan, "must be finite, not nan"),
        ("ratio", "0.5", "must be a number, not '0.5'"),
        ("ratio", "500ms", "must be a number, not '500ms'"),
        ("verify", 1, "must be true or false, not 1"),
        ("verify", "true", "must be true or false, not 'true'"),
        ("name", 3, "must be a text, not 3"),
        ("mode", "quick", "must be 'fast' or 'safe', not 'quick'"),
        ("level", True, "must be 0 or 1, not True"),
        ("names", "a,b", "must be a list, not 'a,b'"),
        ("names", [1], "must be a text, not 1"),
        ("sizes", "1", "must be a list or None, not '1'"),
        ("first", 3, "must be a function or a list, not 3"),
        ("labels", 3, "must be Mapping, not 3"),
    ],
)
def test_an_option_that_does_not_fit(name: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{name: value})

    assert caught.value.key == f"save.write.{name}"
    assert caught.value.source == "argument"
    assert caught.value.problem.startswith(problem)
    assert str(caught.value) == f"save.write.{name}: {caught.value.problem} (from argument)"


@pytest.mark.parametrize(
    ("name", "text", "loaded"),
    [
        ("CONCURRENCY", "4", 4),
        ("PIECE_BYTES", "2MiB", 2 * MIB),
        ("TIMEOUT_S", "0.5", 0.5),
        ("TIMEOUT_S", "5s", 5.0),
        ("RATIO", "0.25", 0.25),
        ("RATIO", "1", 1.0),
        ("VERIFY", "false", False),
        ("VERIFY", "On", True),
        ("NAME", "4", "4"),
        ("MODE", "safe", "safe"),
        ("NAMES", "a, b", ("a", "b")),
        ("NAMES", "", ()),
        ("SIZES", "1,2", (1, 2)),
    ],
)
def test_a_variable_is_read_as_the_type_of_its_option(name: str, text: str, loaded: object) -> None:
    environ = {f"PENSTOCK_SAVE__WRITE__{name}": text, "PENSTOCK_SAVE__PIECE_BYTES": "1", "HOME": "/"}
    found = getattr(load_options(Options, section="save.write", environ=environ), name.lower())

    assert found == loaded
    assert type(found) is type(loaded)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("CONCURRENCY", "four", "must be a whole number, not 'four'"),
        ("CONCURRENCY", "0", "must be positive, not 0"),
        ("RATIO", "nan", "must be finite, not nan"),
        ("VERIFY", "maybe", "must be true or false, not 'maybe'"),
        ("SIZES", "1,b", "must be a whole number, not 'b'"),
        ("FIRST__X", "1", "must be a function or a list, not {'x': '1'}"),
        ("CONCURENCY", "4", "no such option; did you mean PENSTOCK_SAVE__WRITE__CONCURRENCY?"),
    ],
)
def test_a_variable_that_does_not_fit_is_named(name: str, text: str, problem: str) -> None:
    variable = f"PENSTOCK_SAVE__WRITE__{name}"
    with pytest.raises(ConfigError) as caught:
        load_options(Options, section="save.write", environ={variable: text})

    assert caught.value.source == variable
    assert caught.value.problem == problem
    assert caught.value.key.startswith("save.write.")


def test_arguments_outrank_the_environment_which_outranks_the_file() -> None:
    loaded = load_options(
        Options,
        section="a",
        toml={"concurrency": 3, "ratio": 3.0, "name": "3"},
        environ={"PENSTOCK_A__RATIO": "4", "PENSTOCK_A__NAME": "4"},
        arguments={"name": "5"},
    )

    assert loaded == Options(concurrency=3, ratio=4.0, name="5")


def test_an_instance_gives_the_defaults() -> None:
    before = Options(concurrency=7, name="kept")

    assert load_options(before, arguments={"concurrency": 8}) == Options(concurrency=8, name="kept")
    assert before.concurrency == 7


def test_an_unknown_option_is_told_with_the_nearest_or_with_all() -> None:
    with pytest.raises(
        ConfigError, match=r"^save\.write\.concurency: no such option; did you mean save\.write\."
    ):
        load(concurency=3)
    with pytest.raises(
        ConfigError, match=r"no such option; known here: save\.write\.concurrency, save\.write\.p"
    ):
        load(zzz=3)


def test_an_option_without_a_default_is_required() -> None:
    assert load_options(Required, arguments={"path": "/a"}) == Required("/a")
    with pytest.raises(ConfigError, match=r"^write\.path: is required"):
        load_options(Required, section="write")


def test_the_defaults() -> None:
    expected = Config(
        MemoryOptions("auto"),
        SaveFlowOptions(16 * MIB, 2048, 4096 * MIB),
        RestoreFlowOptions(32 * MIB, 2048, 32 * MIB),
        StoreOptions("auto"),
    )

    assert Config.load(environ={}) == expected == Config()
    assert Config().save.stages is None
    assert Config().save.stage_options == {}


TOML = """
[memory]
limit_bytes = "2GiB"

[save]
piece_bytes = "8MiB"
stages = ["flatten", "write"]

[save.write]
concurrency = 4
verify = false

[restore]
batch_leaves = 100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(TOML)
    return path


@pytest.mark.parametrize("named_by", ["argument", "variable"])
def test_a_file_is_read(file: Path, named_by: str) -> None:
    if named_by == "argument":
        config = Config.load(file, environ={"PENSTOCK_CONFIG": "/absent"})
    else:
        config = Config.load(environ={"PENSTOCK_CONFIG": str(file)})

    assert config.memory.limit_bytes == 2 * 2**30
    assert (config.save.piece_bytes, config.save.batch_leaves) == (8 * MIB, 2048)
    assert config.save.stages == ("flatten", "write")
    assert config.restore.batch_leaves == 100
    assert load_options(Options, arguments=config.save.stage_options["write"]) == Options(4, verify=False)


def test_the_environment_of_the_process_is_the_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    monkeypatch.setenv("PENSTOCK_MEMORY__LIMIT_BYTES", "auto")

    config = Config.load()
    assert config.memory.limit_bytes == "auto"
    assert config.save.piece_bytes == 8 * MIB


def test_every_layer_can_set_an_option_of_a_stage(file: Path) -> None:
    config = Config.load(
        file,
        environ={"PENSTOCK_SAVE__WRITE__CONCURRENCY": "5", "PENSTOCK_SAVE__WRITE__TIMEOUT_S": "5s"},
        arguments={"save": {"write": {"timeout_s": 6}, "commit": {"name": "c"}}},
    )
    write = load_options(Options, section="write", arguments=config.save.stage_options["write"])

    assert write == Options(concurrency=5, timeout_s=6.0, verify=False)
    assert config.save.stage_options.keys() == {"write", "commit"}


@pytest.mark.parametrize(
    ("wrong", "source", "message"),
    [
        ("concurrency = 0", "penstock.toml", "save.write.concurrency: must be positive, not 0"),
        (
            "concurency = 1",
            "penstock.toml",
            "save.write.concurency: no such option; did you mean save.write.conc",
        ),
        (
            "PENSTOCK_SAVE__WRITE__CONCURRENCY=x",
            "PENSTOCK_SAVE__WRITE__CONCURRENCY",
            "save.write.concurrency: ",
        ),
    ],
)
def test_a_wrong_option_of_a_stage_is_told_by_its_whole_name_and_source(
    tmp_path: Path, wrong: str, source: str, message: str
) -> None:
    path, environ = tmp_path / "penstock.toml", dict[str, str]()
    if wrong.startswith("PENSTOCK_"):
        path.write_text("")
        environ = dict([wrong.split("=")])
    else:
        path.write_text(f"[save.write]\n{wrong}\n")
    config = Config.load(path, environ=environ)

    with pytest.raises(ConfigError) as caught:
        load_options(Options(), section="write", arguments=config.save.stage_options["write"])
    assert caught.value.source.endswith(source)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("toml", "key", "problem"),
    [
        ("[memory]\nlimit_bytes = 'most'", "memory.limit_bytes", "'most' is not a number of bytes"),
        ("[memory]\nlimit_bytes = 0", "memory.limit_bytes", "must be positive, not 0"),
        ("[memory]\nlimit_bytes = 1.5", "memory.limit_bytes", "must be a whole number or 'auto', not 1.5"),
        ("[memory]\nlimit = 3", "memory.limit", "no such option; did you mean memory.limit_bytes?"),
        (
            "[memory.limit_bytes]\na = 3",
            "memory.limit_bytes",
            "must be a whole number or 'auto', not {'a': 3}",
        ),
        ("memory = 3", "memory", "must be a table, not 3"),
        ("[sav]\npiece_bytes = 3", "sav.piece_bytes", "no such option; did you mean save.piece_bytes?"),
        ("[save]\npeice_bytes = 3", "save.peice_bytes", "no such option; did you mean save.piece_bytes?"),
        ("[save]\nwrite = 3", "save.write", "no such option; known here: save.piece_bytes, "),
        ("[save]\nstage_options = 3", "save.stage_options", "no such option; "),
        ("[save]\nbatch_leaves = inf", "save.batch_leaves", "must be a whole number, not inf"),
    ],
)
def test_a_wrong_file_is_told_by_key_and_source(tmp_path: Path, toml: str, key: str, problem: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        Config.load(path, environ={})

    assert caught.value.key == key
    assert caught.value.problem.startswith(problem)
    assert caught.value.source == str(path)


@pytest.mark.parametrize("content", [b"[memory", b"\xff"])
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "penstock.toml"
    path.write_bytes(content)

    with pytest.raises(
        ConfigError, match=r"^config: .*penstock\.toml' is not TOML: .* \(from PENSTOCK_CONFIG\)"
    ):
        Config.load(environ={"PENSTOCK_CONFIG": str(path)})


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"^config: cannot read '/absent': No such file .* \(from argument\)$"
    ):
        Config.load("/absent", environ={})


@pytest.mark.parametrize(
    ("variable", "problem"),
    [
        ("PENSTOCK_MEMORY_LIMIT_BYTES", "did you mean PENSTOCK_MEMORY__LIMIT_BYTES?"),
        ("PENSTOCK_MEMORY__LIMIT", "did you mean PENSTOCK_MEMORY__LIMIT_BYTES?"),
        ("PENSTOCK_ZZZ", "known here: PENSTOCK_MEMORY__LIMIT_BYTES, "),
    ],
)
def test_a_misspelt_variable_is_never_passed_over(variable: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="no such option") as caught:
        Config.load(environ={variable: "1GiB"})

    assert caught.value.source == variable
    assert problem in caught.value.problem


def test_a_config_can_be_changed_by_arguments() -> None:
    config = Config.load(environ={}, arguments={"save": {"batch_leaves": 9, "write": {"concurrency": 3}}})
    changed = config.changed({"memory": {"limit_bytes": "1GiB"}, "save": {"write": {"name": "n"}}})

    assert changed.memory.limit_bytes == 2**30
    assert changed.save.batch_leaves == 9
    assert load_options(Options, arguments=changed.save.stage_options["write"]) == Options(3, name="n")
    assert config.memory.limit_bytes == "auto"
    assert config.save.stage_options["write"].keys() == {"concurrency"}


def test_what_does_not_fit_is_refused_in_a_changed_config_too() -> None:
    with pytest.raises(ConfigError, match=r"^memory\.limit_bytes: must be positive"):
        Config().changed({"memory": {"limit_bytes": 0}})


def checked_by_types() -> tuple[Options, Any]:
    """What a call returns, a checker knows."""
    of_class: Options = load_options(Options)
    of_instance: Options = load_options(of_class)
    return of_class, of_instance
