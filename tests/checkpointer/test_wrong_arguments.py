"""Arguments of another type are refused by an error that names them, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Checkpointer
from penstock.errors import SpecError

pytestmark = pytest.mark.anyio

STATE = {"a": np.ones(3)}


async def test_what_is_no_store_is_refused() -> None:
    wrong: Any = 5
    with pytest.raises(SpecError, match=r"class derives from penstock\.kernel\.Store, not 5"):
        async with Checkpointer(store=wrong):
            pass


@pytest.mark.parametrize("keyword", ["save_pipeline", "restore_pipeline"])
async def test_what_is_no_pipeline_is_refused_when_it_is_given_for_all(keyword: str) -> None:
    options: Any = {keyword: 5}
    with pytest.raises(SpecError, match=r"must be a penstock\.Pipeline, not 5"):
        async with Checkpointer(**options):
            pass


async def test_what_is_no_pipeline_is_refused_for_one_call(tmp_path: Path) -> None:
    wrong: Any = 5
    async with Checkpointer() as checkpointer:
        with pytest.raises(SpecError, match=r"must be a penstock\.Pipeline, not 5"):
            await checkpointer.save(tmp_path / "1", STATE, pipeline=wrong)

        assert list(tmp_path.iterdir()) == []
        await (await checkpointer.save(tmp_path / "1", STATE))
        with pytest.raises(SpecError, match=r"must be a penstock\.Pipeline, not 5"):
            await checkpointer.restore(tmp_path / "1", pipeline=wrong)
        with pytest.raises(SpecError, match=r"must be a penstock\.Pipeline, not 5"):
            async with checkpointer.stream(tmp_path / "1", pipeline=wrong):
                pass


async def test_what_is_no_staging_is_refused(tmp_path: Path) -> None:
    wrong: Any = "no"
    async with Checkpointer() as checkpointer:
        with pytest.raises(SpecError, match="staging must be 'copy' or 'overlap', not 'no'"):
            await checkpointer.save(tmp_path / "1", STATE, staging=wrong)

    assert list(tmp_path.iterdir()) == []
