"""Shardings as texts."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tests.handlers.leaves.round_trips import P

from penstock.handlers.leaves.sharding import UNKNOWN, decode, encode


def named(
    spec: PartitionSpec, shape: tuple[int, ...] = (2, 4), types: AxisType = AxisType.Auto
) -> NamedSharding:
    devices = np.array(jax.devices()[::-1][: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y", "z")[: len(shape)], axis_types=(types,) * len(shape)), spec)


def fields(**changes: Any) -> str:
    text = encode(named(P("x", None)))
    assert text is not None
    merged = json.loads(text) | changes
    return json.dumps({key: value for key, value in merged.items() if value != "drop"})


@pytest.mark.parametrize("types", list(AxisType))
@pytest.mark.parametrize(
    "spec", [P(), P(None), P("x"), P("x", None), P(None, "y"), P(("x", "y"), None), P(("y",))], ids=str
)
def test_a_named_sharding_comes_back(spec: PartitionSpec, types: AxisType) -> None:
    sharding = named(spec, types=types)
    saved = decode(encode(sharding))
    assert saved.sharding == sharding
    assert saved.n_devices == 8


def test_the_text_is_what_the_format_says() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    text = encode(NamedSharding(mesh, P("x", None)))
    assert json.loads(text or "") == {
        "sharding_type": "NamedSharding",
        "shape": [2],
        "axis_names": ["x"],
        "axis_types": ["AxisType.Auto"],
        "partition_spec": ["x", None],
        "device_mesh": {"mesh": [{"id": 0}, {"id": 1}]},
    }
    assert json.loads(encode(SingleDeviceSharding(jax.devices()[1])) or "") == {
        "sharding_type": "SingleDeviceSharding",
        "device_str": str(jax.devices()[1]),
    }


@pytest.mark.parametrize("name", ["cpu:3", "TFRT_CPU_3"])
def test_old_and_new_names_of_a_cpu_device_are_understood(name: str) -> None:
    saved = decode(json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": name}))
    assert saved.sharding == SingleDeviceSharding(jax.devices()[3])


def test_old_texts_without_a_mesh_or_axis_types_mean_the_first_devices_in_order() -> None:
    sharding = decode(fields(device_mesh="drop", axis_types="drop")).sharding
    assert isinstance(sharding, NamedSharding)
    assert [device.id for device in np.asarray(sharding.mesh.devices).flat] == list(range(8))
    assert sharding.mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize(
    ("changes", "n_devices"),
    [
        ({"device_mesh": {"mesh": [[{"id": at} for at in range(1, 9)]]}}, 8),
        ({"shape": [4, 4], "device_mesh": "drop"}, 16),
        ({"shape": [1 << 40, 1 << 10], "device_mesh": "drop"}, 1 << 50),
    ],
)
def test_devices_that_are_not_here_are_counted(changes: dict[str, Any], n_devices: int) -> None:
    saved = decode(fields(**changes))
    assert saved.sharding is None
    assert saved.n_devices == n_devices


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "rubbish",
        "3",
        "[]",
        "{}",
        '{"sharding_type": "GSPMDSharding"}',
        fields(shape="drop"),
        fields(shape=None),
        fields(shape=[3, 1]),
        fields(axis_names=["x"]),
        fields(partition_spec=["w"]),
        fields(partition_spec=["x", "x"]),
        fields(partition_spec=3),
        fields(axis_types=["AxisType.X", "Y"]),
        fields(device_mesh={"mesh": 3}),
        fields(device_mesh={"mesh": [[{}] * 8]}),
        fields(device_mesh=[]),
    ],
)
def test_what_is_not_understood_is_unknown(text: str | None) -> None:
    assert decode(text) == UNKNOWN


ANY_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda x: st.lists(x, max_size=3), max_leaves=6
)


@given(ANY_JSON)
def test_no_document_makes_it_raise(value: object) -> None:
    for key in ("shape", "axis_names", "axis_types", "partition_spec", "device_mesh", "sharding_type"):
        decode(fields(**{key: value}))


def test_what_the_format_has_no_words_for_is_not_stored() -> None:
    assert encode(NamedSharding(named(P()).mesh.abstract_mesh, P("x"))) is None
    assert encode(named(P(PartitionSpec.UNCONSTRAINED, "y"))) is None
