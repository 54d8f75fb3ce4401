"""What `make fuzz` once found stays mended."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tests.proofs.fuzz import KEPT, Input
from tests.proofs.fuzz_targets import WHOLE, checkpoint_seeds, run_target, run_whole

import penstock

FOUND = sorted(KEPT.iterdir()) if KEPT.exists() else []
CHECKPOINTS = [path for path in FOUND if path.name.startswith(WHOLE)]
DOCUMENTS = [path for path in FOUND if path not in CHECKPOINTS]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return checkpoint_seeds(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kept", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_found_by_fuzzing_is_an_error_of_penstock_or_none(kept: Path, tmp_path: Path) -> None:
    one = Input.unpacked(kept.read_bytes())

    run_target(one.target, one.data, tmp_path / "work")


@pytest.mark.parametrize("kept", CHECKPOINTS, ids=lambda path: path.name)
def test_a_checkpoint_found_by_fuzzing_is_an_error_of_penstock_or_none(
    kept: Path, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    one = Input.unpacked(kept.read_bytes())
    work = tmp_path_factory.mktemp("work") / "work"  # where files of the checkpoint can be linked to

    async def read() -> None:
        async with penstock.Checkpointer(memory_limit="64MiB") as checkpointer:
            await run_whole(checkpointer, checkpoints[one.seed], one.file, one.data, work)

    anyio.run(read)
