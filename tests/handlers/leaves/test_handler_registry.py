from __future__ import annotations

import sys
import threading
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from penstock import HandlerRegistry
from penstock.errors import AmbiguousHandlerError, ConfigError, HandlerError, NoHandlerError, PipelineError
from penstock.handlers.leaves.adapted_handler import AdaptedHandler
from penstock.kernel import Leaf, LeafSpec, ParamInfo, PiecePlan, ReadLeaf, StoredRows, Target, TypeHandler
from penstock.kernel.registry import StageRegistry, find_plugins


@dataclass(eq=False)
class Streaming:
    typestr: str = "streaming"

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        raise NotImplementedError

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        raise NotImplementedError

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target]:
        raise NotImplementedError

    def build(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        raise NotImplementedError


class OtherStreaming(Streaming):
    pass


class Batch:
    def typestr(self) -> str:
        return "batch"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError

    def memory_size(self, values: Any) -> Any:
        raise NotImplementedError

    def finalize(self, directory: str) -> None:
        raise NotImplementedError


class Base: ...


class Left(Base): ...


class Right(Base): ...


class Bottom(Left, Right): ...


class Shape(ABC): ...  # noqa: B024 - an abstract base class is all these tests ask for


class Round(Shape): ...


class Flat(ABC): ...  # noqa: B024 - as above


class Sized(Protocol):
    size: int


def name(class_: type) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"


@pytest.fixture
def registry() -> HandlerRegistry:
    return HandlerRegistry(entry_points=False)


def test_the_exact_type_comes_before_its_bases(registry: HandlerRegistry) -> None:
    for_base, for_left = Streaming(), Streaming()
    registry.register(Base, for_base)
    registry.register(Left, for_left)

    assert registry.lookup(Left, "x") is for_left
    assert registry.lookup(Base, "x") is for_base


def test_of_several_bases_the_first_in_resolution_order_counts(registry: HandlerRegistry) -> None:
    for_base, for_right = Streaming(), Streaming()
    registry.register(Base, for_base)
    registry.register(Right, for_right)
    assert registry.lookup(Bottom, "x") is for_right

    for_left = Streaming()
    registry.register(Left, for_left)
    assert registry.lookup(Bottom, "x") is for_left


def test_a_real_base_comes_before_an_abstract_one(registry: HandlerRegistry) -> None:
    class Both(Base): ...

    Shape.register(Both)
    for_base = Streaming()
    registry.register(Shape, Streaming())
    registry.register(Base, for_base)

    assert registry.lookup(Both, "x") is for_base


def test_the_more_specific_abstract_base_wins_whichever_came_first(registry: HandlerRegistry) -> None:
    class Ball: ...

    Round.register(Ball)
    for_round = Streaming()
    registry.register(Round, for_round)
    registry.register(Shape, Streaming())

    assert registry.lookup(Ball, "x") is for_round


def test_two_abstract_bases_that_fit_equally_well_are_named(registry: HandlerRegistry) -> None:
    class Coin: ...

    Round.register(Coin)
    Flat.register(Coin)
    registry.register(Round, Streaming())
    registry.register(Flat, OtherStreaming())

    with pytest.raises(AmbiguousHandlerError) as caught:
        registry.lookup(Coin, "['coin']")
    assert caught.value.candidates == (name(Streaming), name(OtherStreaming))
    assert caught.value.key_path == "['coin']"
    assert "Coin" in str(caught.value)


def test_one_handler_for_two_abstract_bases_is_no_tie(registry: HandlerRegistry) -> None:
    class Coin: ...

    Round.register(Coin)
    Flat.register(Coin)
    batch = Batch()
    registry.register(Round, batch)
    registry.register(Flat, batch)

    assert registry.lookup(Coin, "x") == AdaptedHandler(batch)


def test_object_fits_last_of_all(registry: HandlerRegistry) -> None:
    class Ball: ...

    Round.register(Ball)
    for_object, for_round = Streaming(), Streaming()
    registry.register(object, for_object)
    registry.register(Round, for_round)

    assert registry.lookup(Ball, "x") is for_round
    assert registry.lookup(Left, "x") is for_object
    assert registry.lookup(object, "x") is for_object


def test_an_unknown_type_is_an_error_that_says_where_and_what_is_known(registry: HandlerRegistry) -> None:
    registry.register(int, Streaming())
    registry.register(Base, Streaming())

    with pytest.raises(NoHandlerError) as caught:
        registry.lookup(dict, "['opt'][0]")
    assert caught.value.key_path == "['opt'][0]"
    assert caught.value.type_name == "dict"
    assert str(caught.value).endswith(f"handled here: int, {name(Base)}")


def test_registering_drops_what_was_remembered(registry: HandlerRegistry) -> None:
    before, after = Streaming(), Streaming()
    registry.register(Base, before)
    assert registry.lookup(Left, "x") is before

    registry.register(Left, after)
    assert registry.lookup(Left, "x") is after


def test_a_lookup_is_remembered() -> None:
    asked = list[type]()

    class Curious(type):
        def __subclasscheck__(cls, subclass: type) -> bool:
            asked.append(subclass)
            return True

    class Anything(metaclass=Curious): ...

    registry, handler = HandlerRegistry(entry_points=False), Streaming()
    registry.register(Anything, handler)
    registry.lookup(Left, "x")
    asked.clear()

    assert registry.lookup(Left, "x") is handler
    assert asked == []


def test_a_second_handler_for_a_type_is_an_error_that_names_both(registry: HandlerRegistry) -> None:
    first = Streaming()
    registry.register(int, first)

    with pytest.raises(HandlerError) as caught:
        registry.register(int, OtherStreaming())
    assert str(caught.value) == (
        f"int is handled by {name(Streaming)} already; "
        f"pass override=True to let {name(OtherStreaming)} replace it"
    )
    assert registry.lookup(int, "x") is first


def test_override_replaces_a_handler(registry: HandlerRegistry) -> None:
    second = OtherStreaming()
    registry.register(int, Streaming())
    registry.register(int, second, override=True)

    assert registry.lookup(int, "x") is second
    assert registry.for_typestr("streaming", "x") is second


def test_a_batch_handler_is_adapted_and_named_by_its_own_class(registry: HandlerRegistry) -> None:
    batch: TypeHandler = Batch()
    registry.register(int, batch)
    assert registry.lookup(int, "x") == AdaptedHandler(batch)
    assert registry.for_typestr("batch", "x") == AdaptedHandler(batch)

    with pytest.raises(HandlerError, match=rf"^int is handled by {name(Batch)} already"):
        registry.register(int, Streaming())


def test_an_adapted_handler_is_taken_as_it_is(registry: HandlerRegistry) -> None:
    adapted = AdaptedHandler(Batch())
    registry.register(int, adapted)

    assert registry.lookup(int, "x") is adapted


class Half:
    typestr = "half"

    def describe(self) -> None: ...
    def pieces(self) -> None: ...


@pytest.mark.parametrize(
    ("type_", "handler", "problem"),
    [
        (int, Streaming, f"{name(Streaming)} is a class; register an instance of it"),
        (int, Half(), f"{name(Half)} is not a handler: it has no build, target"),
        (int, 3, "int is not a handler: it has no build, describe, pieces, targets, typestr"),
        (list[int], Streaming(), "list[int] cannot be registered: "),
        (int | str, Streaming(), "int | str cannot be registered: it is not a class"),
        ("int", Streaming(), "'int' cannot be registered: "),
        (Sized, Streaming(), f"{Sized!r} cannot be registered: "),
    ],
)
def test_what_cannot_be_registered_is_refused_at_once(
    registry: HandlerRegistry, type_: Any, handler: Any, problem: str
) -> None:
    with pytest.raises(HandlerError) as caught:
        registry.register(type_, handler)
    assert str(caught.value).startswith(problem)
    assert registry.known() == ()


def test_a_type_name_on_disk_finds_its_handler(registry: HandlerRegistry) -> None:
    one, two = Streaming("one"), Streaming("two")
    registry.register(int, one)
    registry.register(str, two)

    assert registry.for_typestr("two", "x") is two


def test_an_unknown_type_name_is_an_error_with_the_known_ones(registry: HandlerRegistry) -> None:
    registry.register(int, Streaming("one"))
    registry.register(float, Streaming("one"), override=True)

    with pytest.raises(NoHandlerError) as caught:
        registry.for_typestr("three", "['a']")
    assert caught.value.key_path == "['a']"
    assert "'three'" in caught.value.type_name
    assert str(caught.value).endswith("handled here: one")


def test_two_handlers_with_one_type_name_are_named(registry: HandlerRegistry) -> None:
    registry.register(int, Streaming("same"))
    registry.register(str, OtherStreaming("same"))

    with pytest.raises(AmbiguousHandlerError) as caught:
        registry.for_typestr("same", "x")
    assert caught.value.candidates == (name(Streaming), name(OtherStreaming))


@pytest.mark.parametrize("general_first", [True, False])
def test_of_two_with_one_type_name_the_more_general_type_reads(
    registry: HandlerRegistry, general_first: bool
) -> None:
    general, special = Streaming("same"), Streaming("same")
    both = [(Base, general), (Left, special)]
    for type_, handler in both if general_first else reversed(both):
        registry.register(type_, handler)

    assert registry.for_typestr("same", "x") is general


def test_a_copy_is_independent_both_ways(registry: HandlerRegistry) -> None:
    registry.register(int, Streaming())
    registry.lookup(bool, "x")
    copy = registry.copy()
    for_bool = Streaming()
    copy.register(bool, for_bool)
    assert copy.lookup(bool, "x") is for_bool
    assert registry.lookup(bool, "x") is not for_bool
    registry.register(str, Streaming())

    assert registry.known() == ("int", "str")
    assert copy.known() == ("bool", "int")


@dataclass
class Site:
    """A folder on `sys.path` into which distributions are put."""

    folder: Path

    def install(self, distribution: str, group: str, points: dict[str, str], source: str) -> None:
        info = self.folder / f"{distribution}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        lines = [f"{point} = {module}" for point, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        module = next(iter(points.values())).partition(":")[0]
        (self.folder / f"{module}.py").write_text(source)

    def install_handlers(self, distribution: str, source: str) -> None:
        module = f"{distribution}_code"
        self.install(distribution, "penstock.handlers", {"all": f"{module}:handlers"}, source)

    def install_stages(self, distribution: str, names: Sequence[str], source: str) -> None:
        module = f"{distribution}_code"
        self.install(distribution, "penstock.stages", {n: f"{module}:{n}" for n in names}, source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for added in set(sys.modules) - modules:
        if added.endswith("_code"):
            del sys.modules[added]


def handler_source(types: str, typestr: str = "plugged") -> str:
    # The tests are not importable by name, so a distribution brings a handler class of its own.
    return f"""
import fractions, types

def handlers():
    class Plugged:
        typestr = {typestr!r}
        describe = pieces = targets = build = None
    return {{type_: Plugged() for type_ in ({types},)}}
"""


def test_an_entry_point_is_loaded_when_nothing_exact_is_found(site: Site) -> None:
    site.install_handlers("fractional", handler_source("fractions.Fraction"))
    registry = HandlerRegistry()
    registry.register(int, Streaming())
    registry.lookup(int, "x")
    assert "fractional_code" not in sys.modules
    assert registry.known() == ("int",)

    from fractions import Fraction

    assert registry.lookup(Fraction, "x").typestr == "plugged"
    assert registry.known() == ("fractions.Fraction", "int")


def test_an_entry_point_is_loaded_for_an_unknown_type_name(site: Site) -> None:
    site.install_handlers("fractional", handler_source("fractions.Fraction"))
    registry = HandlerRegistry()

    assert registry.for_typestr("plugged", "x").typestr == "plugged"


def test_an_entry_point_cannot_replace_what_was_registered_by_hand(site: Site) -> None:
    site.install_handlers("greedy", handler_source("int, fractions.Fraction"))
    registry, mine = HandlerRegistry(), Streaming("plugged")
    registry.register(int, mine)
    with pytest.raises(NoHandlerError):
        registry.lookup(dict, "x")

    assert registry.lookup(int, "x") is mine
    assert registry.lookup(bool, "x") is mine
    assert registry.for_typestr("plugged", "x") is mine


def test_two_entry_points_for_one_type_are_an_error_for_that_type_only(site: Site) -> None:
    site.install_handlers("first", handler_source("fractions.Fraction, int"))
    site.install_handlers("second", handler_source("fractions.Fraction"))
    from fractions import Fraction

    registry = HandlerRegistry()
    registry.lookup(int, "x")
    with pytest.raises(AmbiguousHandlerError, match="Fraction") as caught:
        registry.lookup(Fraction, "x")
    assert [candidate.partition(".")[0] for candidate in caught.value.candidates] == [
        "first_code",
        "second_code",
    ]

    mine = Streaming()
    registry.register(Fraction, mine)
    assert registry.lookup(Fraction, "x") is mine


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def handlers(): return 3", "it returned 3, not a mapping from type to handler"),
        ("def handlers(): return {int: 3}", "int is not a handler"),
        ("def handlers(): return {'int': 3}", "'int' cannot be registered"),
        ("def handlers(registry): pass", "TypeError: handlers() missing 1 required positional argument"),
        ("", "AttributeError: "),
    ],
)
def test_a_broken_entry_point_is_an_error_that_names_its_distribution_each_time(
    site: Site, source: str, problem: str
) -> None:
    site.install_handlers("sloppy", source)
    registry = HandlerRegistry()
    for _ in range(2):
        with pytest.raises(HandlerError) as caught:
            registry.lookup(dict, "x")
        assert str(caught.value).startswith(f"entry point 'all' of sloppy 1.2 is broken: {problem}")


def test_entry_points_can_be_left_alone(site: Site) -> None:
    site.install_handlers("sloppy", "import no_such_module")
    registry = HandlerRegistry(entry_points=False)

    with pytest.raises(NoHandlerError):
        registry.lookup(dict, "x")
    with pytest.raises(NoHandlerError):
        registry.copy().lookup(dict, "x")


def test_threads_that_look_up_at_once_load_entry_points_once(site: Site) -> None:
    site.install_handlers("counted", handler_source("fractions.Fraction") + "types.loaded = []\n")
    from fractions import Fraction

    registry, found = HandlerRegistry(), list[object]()
    barrier = threading.Barrier(8)

    def look() -> None:
        barrier.wait(10)
        found.append(registry.lookup(Fraction, "x"))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert len(found) == 8
    assert len({id(handler) for handler in found}) == 1


@dataclass(frozen=True)
class Write:
    concurrency: int = 1


@dataclass(frozen=True)
class OtherWrite:
    concurrency: int = 2


def test_a_stage_is_made_by_name_with_its_options() -> None:
    stages = StageRegistry[object]({"write": Write}, entry_points=False)

    assert stages.create("write", concurrency=4) == Write(4)
    assert stages.factory("write") is Write
    assert stages.names() == ("write",)


def test_a_stage_name_that_is_taken_is_an_error_that_names_both() -> None:
    stages = StageRegistry[object]({"write": Write}, entry_points=False)
    with pytest.raises(PipelineError) as caught:
        stages.register("write", OtherWrite)
    assert name(Write) in str(caught.value)
    assert name(OtherWrite) in str(caught.value)

    copy = stages.copy()
    copy.register("write", OtherWrite, override=True)
    assert copy.create("write") == OtherWrite(2)
    assert stages.create("write") == Write(1)


def test_an_unknown_stage_name_is_an_error_with_the_nearest() -> None:
    stages = StageRegistry[object]({"write": Write, "read": OtherWrite}, entry_points=False)

    with pytest.raises(PipelineError, match=r"^no stage is called 'wirte'; did you mean 'write'\?$"):
        stages.create("wirte")
    with pytest.raises(PipelineError, match=r"^no stage is called 'zzz'; there are read, write$"):
        stages.create("zzz")


@pytest.mark.parametrize("factory", [Write, lambda concurrency=2: Write(concurrency)])
def test_an_unknown_option_of_a_stage_is_an_error_with_the_nearest(factory: Callable[..., Write]) -> None:
    stages = StageRegistry[object]({"write": factory, "open": lambda **options: options}, entry_points=False)

    with pytest.raises(
        ConfigError, match=r"^write\.concurency: no such option; did you mean write\.concurrency"
    ):
        stages.create("write", concurency=3)
    with pytest.raises(ConfigError, match=r"^write\.zzz: no such option; known here: concurrency"):
        stages.create("write", zzz=3)
    assert stages.create("open", zzz=3) == {"zzz": 3}


def test_a_stage_of_another_distribution_is_imported_when_asked_for(site: Site) -> None:
    site.install_stages("quantiser", ["quantise"], "def quantise(bits=8): return ('quantise', bits)")
    stages = StageRegistry[object]({"write": Write})
    assert stages.names() == ("quantise", "write")
    assert "quantiser_code" not in sys.modules

    assert stages.create("quantise", bits=4) == ("quantise", 4)


def test_a_stage_name_claimed_by_two_distributions_is_an_error_that_names_both(site: Site) -> None:
    for distribution in ("one", "two"):
        site.install_stages(distribution, ["quantise"], "quantise = dict")
    stages = StageRegistry[object]()

    with pytest.raises(PipelineError, match=r"'quantise' is claimed by one 1\.2 and two 1\.2"):
        stages.create("quantise")
    stages.register("quantise", Write)
    assert stages.create("quantise") == Write()


@pytest.mark.parametrize("source", ["1 / 0", "quantise = 3", ""])
def test_a_broken_stage_entry_point_is_an_error_that_names_its_distribution(site: Site, source: str) -> None:
    site.install_stages("sloppy", ["quantise"], source)

    with pytest.raises(PipelineError, match=r"^entry point 'quantise' of sloppy 1\.2 is broken: "):
        StageRegistry[object]().create("quantise")


def test_what_is_installed_later_is_found_and_the_rest_is_not_read_again(site: Site) -> None:
    site.install("first", "penstock.handlers", {"one": "nowhere:one"}, "")
    found = find_plugins("penstock.handlers")

    assert find_plugins("penstock.handlers") is found

    site.install("second", "penstock.handlers", {"two": "nowhere:two"}, "")
    assert [plugin.name for plugin in find_plugins("penstock.handlers")] == ["one", "two"]
