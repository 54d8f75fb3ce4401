from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, StoreOptions, TierOptions
from penstock.config.config import given_layers, profiles_in
from penstock.config.files import find_file, has_options
from penstock.errors import ConfigError
from penstock.handlers import LocalStore
from penstock.kernel.options import given_leaves
from penstock.stores import store_of

TOML = """
[memory]
limit_bytes = "2GiB"
save_concurrent_bytes = "1MiB"

[save.write]
concurrency = 2

[profiles.tpu-pod.memory]
limit_bytes = "64GiB"

[profiles.tpu-pod.save.write]
concurrency = 8

[profiles.laptop]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(TOML)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    return path


def test_the_nearest_file_upwards_is_found_and_one_that_is_named_comes_first(file: Path) -> None:
    found = find_file(None, {})
    assert found is not None
    assert (found.path, found.told_by) == (str(file), "the working directory")
    assert Config.load(environ={}).memory.limit_bytes == 2 << 30

    nearer = file.parent / "a" / "penstock.toml"
    nearer.write_text("")
    assert Config.load(environ={}).memory.limit_bytes == "auto"
    assert Config.load(environ={"PENSTOCK_CONFIG": str(file)}).memory.limit_bytes == 2 << 30
    assert Config.load(file, environ={"PENSTOCK_CONFIG": str(nearer)}).memory.limit_bytes == 2 << 30


def test_a_variable_that_is_set_and_empty_means_no_file(file: Path) -> None:
    assert Config.load(environ={"PENSTOCK_CONFIG": ""}) == Config()


def test_a_file_upwards_that_everybody_may_write_to_is_refused(file: Path) -> None:
    file.chmod(0o666)

    with pytest.raises(ConfigError, match="everybody may write to"):
        Config.load(environ={})
    assert Config.load(file, environ={}).memory.limit_bytes == 2 << 30  # who names it knows it


def test_a_working_directory_that_is_gone_has_no_file(file: Path, tmp_path: Path) -> None:
    gone = tmp_path / "a" / "b"
    gone.rmdir()

    assert find_file(None, {}) is None


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_profile_goes_over_the_file_and_below_the_environment_and_arguments(file: Path, by: str) -> None:
    environ = {"PENSTOCK_MEMORY__RESTORE_CONCURRENT_BYTES": "3MiB"}
    if by == "variable":
        environ["PENSTOCK_PROFILE"] = "tpu-pod"
    arguments = {"save": {"batch_leaves": 7}}
    profile = "tpu-pod" if by == "argument" else None

    config = Config.load(profile=profile, environ=environ, arguments=arguments)

    memory = config.memory
    assert memory.limit_bytes == 64 << 30
    assert (memory.save_concurrent_bytes, memory.restore_concurrent_bytes) == (1 << 20, 3 << 20)
    assert config.save.batch_leaves == 7
    assert config.save.stage_options["write"]["concurrency"].value == 8
    over = Config.load(profile=profile, environ={**environ, "PENSTOCK_MEMORY__LIMIT_BYTES": "1MiB"})
    assert over.memory.limit_bytes == 1 << 20


def test_the_argument_comes_before_the_variable_and_an_empty_profile_is_one(file: Path) -> None:
    config = Config.load(profile="laptop", environ={"PENSTOCK_PROFILE": "tpu-pod"})

    assert config.memory.limit_bytes == 2 << 30
    found = find_file(None, {})
    assert found is not None
    assert profiles_in(found) == ("tpu-pod", "laptop")


@pytest.mark.parametrize(
    ("profile", "environ", "message"),
    [
        ("tpu-pot", {}, r"no profile 'tpu-pot'; .*penstock.toml' has tpu-pod \(from argument\)"),
        (None, {"PENSTOCK_PROFILE": "x"}, r"has laptop, tpu-pod \(from PENSTOCK_PROFILE\)"),
        ("x", {"PENSTOCK_CONFIG": ""}, "no profile 'x', and no file for it"),
    ],
)
def test_a_profile_that_is_not_there_is_told(
    file: Path, profile: str | None, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(profile=profile, environ=environ)


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("profiles = 3", "profiles"),
        ("[profiles]\nx = 3", "profiles.x"),
        ("[profiles.x.memory]\nlimit = 3", "profiles.x.memory.limit"),
        ("[profiles.x.profiles.y]\na = 3", "profiles.x.profiles.y.a"),
    ],
)
def test_a_wrong_profile_is_told_by_its_whole_key(file: Path, toml: str, key: str) -> None:
    file.write_text(toml)

    with pytest.raises(ConfigError) as caught:
        Config.load(profile="x", environ={})
    assert (caught.value.key, caught.value.source) == (key, str(file))


def test_every_value_that_is_given_has_its_source(file: Path) -> None:
    environ = {"PENSTOCK_SAVE__WRITE__CONCURRENCY": "3"}
    table = given_layers(profile="tpu-pod", environ=environ, arguments={"store": {"io": "direct"}})

    assert {key: given.source for key, given in given_leaves(table)} == {
        "memory.limit_bytes": str(file),
        "memory.save_concurrent_bytes": str(file),
        "save.write.concurrency": "PENSTOCK_SAVE__WRITE__CONCURRENCY",
        "store.io": "argument",
    }


def test_without_a_file_and_a_variable_there_are_no_options(file: Path) -> None:
    assert has_options({})
    file.unlink()
    assert not has_options({"HOME": "/root"})
    assert has_options({"PENSTOCK_STORE__LINKS": "any"})
    assert has_options({"PENSTOCK_CONFIG": ""})  # which is looked at


def test_a_store_for_looking_has_the_options_that_are_given_and_else_their_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.unlink()
    assert isinstance(store_of("here")[0], LocalStore)
    taken = inspect.signature(LocalStore).parameters
    assert {name: taken[name].default for name in ("io", "links")} == {
        name: getattr(StoreOptions(), name) for name in ("io", "links")
    }

    file.write_text('[store]\nlinks = "none"')
    with pytest.raises(ConfigError, match="links"):
        store_of("here")

    file.unlink()
    monkeypatch.setenv("PENSTOCK_STORE__LNKS", "any")
    with pytest.raises(ConfigError, match="LINKS"):
        store_of("here")


NONE_IN_MEMORY = 'is for a tier with kind = "disk"; one in memory has none'
TIERS = """
[[tier]]
kind = "memory"
limit_bytes = "1GiB"

[[tier]]
path = "near"
keep_last = 3

[[profiles.laptop.tier]]
path = "disk"
"""


def test_an_array_of_tables_is_read_in_its_order_and_that_of_a_profile_takes_its_place(
    tmp_path: Path,
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TIERS)
    memory, disk = TierOptions("memory", limit_bytes=2**30), TierOptions(path="near", keep_last=3)
    assert Config.load(file, environ={}).tier == (memory, disk)
    assert Config.load(file, profile="laptop", environ={}).tier == (TierOptions(path="disk"),)
    assert Config(tier=(disk,)).tier == (disk,)
    given: Any = [{"path": "near", "keep_last": 3}, memory]
    assert Config.load(environ={}, arguments={"tier": given}).tier == (disk, memory)


@pytest.mark.parametrize(
    ("toml", "key", "problem"),
    [
        ("[tier]\npath='a'", "tier", "must be an array of tables: write [[tier]], once for each"),
        ("tier = ['memory']", "tier[0]", "must be a table, not 'memory'"),
        ("[[tier]]\npth='a'", "tier[0].pth", "no such option; did you mean tier[0].path?"),
        ("[[tier]]\nkeep_last=3", "tier[0].path", 'is missing; a tier in memory has kind = "memory"'),
        ("[[tier]]\npath='a'\n[[tier]]\nkeep_last=0", "tier[1].keep_last", "must be positive, not 0"),
        ("[[tier]]\nkind='memory'\npath='a'", "tier[0].path", NONE_IN_MEMORY),
        ("[[tier]]\npath='a'\nlimit_bytes=1", "tier[0].limit_bytes", 'is for a tier with kind = "memory"'),
    ],
)  # fmt: skip
def test_an_error_in_an_array_of_tables_says_which_table_it_is_in(
    tmp_path: Path, toml: str, key: str, problem: str
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        Config.load(file, environ={})

    assert (caught.value.key, caught.value.problem, caught.value.source) == (key, problem, str(file))


def test_an_array_of_tables_is_not_set_by_a_variable() -> None:
    for name in ("PENSTOCK_TIER", "PENSTOCK_TIER__PATH"):
        with pytest.raises(ConfigError, match="cannot be set by a variable") as caught:
            Config.load(environ={name: "near", "PENSTOCK_CONFIG": ""})

        assert caught.value.source == name
