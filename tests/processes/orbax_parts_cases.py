"""Trees that v1 saves in parts, in all processes of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from tests.processes.job_case import Here
from tests.processes.trees import SPECS, differences, mesh_of, spread, values

from penstock.errors import CorruptCheckpointError, PeerFailedError, PlansDifferError
from penstock.orbax import v1
from penstock.orbax.v1.errors import PartialSaveReplacementError


async def orbaxs_parts_are_put_together(here: Here) -> Any:
    """Save two parts and finalize; then everything that is refused."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    first = {name: arrays[name] for name in ("rows", "both", "nested")}
    second = {name: arrays[name] for name in ("by_device", "replicated", "half")}

    def save() -> dict[str, Any]:
        from orbax.checkpoint.experimental import v1 as theirs

        path = here.folder / "tree"
        v1.partial.save(path, {**first, "number": 7}, custom_metadata={"a": 1, "b": 1})
        v1.partial.save_async(path, second, custom_metadata={"b": 2}).result()
        odd = {"odd": here.rank} if here.rank == here.last else {"even": here.rank}
        refused = [
            _raised_by(v1.partial.save, path, {"rows": arrays["rows"]}),
            _raised_by(v1.partial.save, path, odd),
        ]
        v1.partial.finalize(path)
        refused += [
            _raised_by(v1.partial.save, path, {"more": 1}),
            _raised_by(v1.partial.finalize, path),
            _raised_by(v1.partial.finalize, here.folder / "none"),
        ]
        whole = {**first, **second, "number": 7}
        return {
            "refused": refused,
            "differs": differences(v1.load(path, whole), whole),
            "by Orbax": differences(theirs.load(str(path), whole), whole),
            "custom": v1.metadata(path).custom_metadata,
        }

    found = await anyio.to_thread.run_sync(save)
    await here.meet("the parts are gone")
    return {**found, "there": here.names()}


async def a_part_is_damaged_for_one_process(here: Here) -> Any:
    """What the last process is to read of a part has other bytes: all are told, and nothing is published."""
    arrays = spread({"rows": values()["rows"]}, {"rows": SPECS["rows"]}, mesh_of(here.count))

    def save() -> None:
        v1.partial.save(here.folder / "tree", arrays)

    def finalize() -> str:
        return _raised_by(v1.partial.finalize, here.folder / "tree")

    await anyio.to_thread.run_sync(save)
    if here.rank == here.last:
        written = here.folder.glob(f"tree.partial_save/*/state/ocdbt.process_{here.last}/d/*")
        data = max(written, key=lambda path: path.stat().st_size)
        found = bytearray(data.read_bytes())
        found[100] ^= 1
        data.write_bytes(found)

    await here.meet("it is damaged")
    raised = await anyio.to_thread.run_sync(finalize)
    await here.meet("all have heard")
    return [raised, here.names()]


def _raised_by(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except (PartialSaveReplacementError, PlansDifferError, FileExistsError, FileNotFoundError) as error:
        return type(error).__name__
    except CorruptCheckpointError as error:
        return f"{error.key_path} is damaged"
    except PeerFailedError as error:
        return f"process {error.processes[0]}: {error.key_path}"

    return "nothing"
