"""Installs the wheel into empty environments, with the newest and the oldest dependencies, and tries it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

from tests.release.places import WORK, interpreter, project, quietly, ten_lines, venv

__all__ = ("WHICH", "install", "oldest")

WHICH = ("oldest", "newest")
DEMO = ("demo", "--small", "--steps", "12", "--every", "4")
CHECKED = ("jax", "tensorstore", "anyio", "numpy")

RESTORED = """
import anyio, json, sys
import penstock
from importlib.metadata import version

async def main():
    state = await penstock.restore("run/100")
    assert float(state["params"]["w"].sum()) == 1024 * 1024 and state["step"] == 100
    assert (await penstock.verify("run/100")).status == "intact"
    async with penstock.Checkpointer(save_format=penstock.SaveFormat(codec="zstd")) as checkpointer:
        await (await checkpointer.save("encoded", state))
        again = await checkpointer.restore("encoded", like=state)
        assert (again["params"]["w"] == state["params"]["w"]).all()
    async with penstock.CheckpointManager("steps", keep=penstock.steps.KeepLast(1)) as manager:
        for step in (1, 2):
            await manager.save(step, state)
        await manager.wait()
        assert manager.latest_step() == 2

anyio.run(main)
assert penstock.__version__ == version("penstock"), penstock.__version__
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def oldest(dependencies: list[str]) -> list[str]:
    """The lower bounds of requirements, as constraints for pip."""
    found: list[str] = []
    for requirement in dependencies:
        matched = re.match(r"([\w.-]+)(?:\[[\w,]*\])?>=([\w.]+)", requirement.replace(" ", ""))
        if matched is None:
            raise ValueError(f"{requirement} has no lower bound")
        found.append(f"{matched[1]}=={matched[2]}")

    return found


def install(wheel: Path, version: str, which: str) -> bool:
    """Install the wheel, run the README's program and a little more; return whether this Python is here."""
    python = interpreter(version)
    if python is None:
        print(f"  {version}, {which}: no such Python here")
        return False

    constraints = WORK / "oldest.txt"
    constraints.write_text("\n".join(oldest(project()["dependencies"])) + "\n")
    more = ["--constraint", str(constraints)] if which == "oldest" else []
    inside = venv(f"{version}-{which}", python, *more, wheel, again=True)
    quietly(inside, "-m", "pip", "check")
    place = Path(tempfile.mkdtemp(prefix="penstock-release-"))
    try:
        quietly(inside, "-c", ten_lines(), cwd=place)
        said = quietly(
            inside, "-W", "error::DeprecationWarning:penstock", "-c", RESTORED, *CHECKED, cwd=place
        )
        quietly(inside.parent / "penstock", "verify", "run/100", cwd=place)
        quietly(inside.parent / "penstock", *DEMO, cwd=place)
    finally:
        shutil.rmtree(place)

    found = json.loads(said.strip().splitlines()[-1])
    print(f"  {version}, {which}: " + ", ".join(f"{name} {found[name]}" for name in CHECKED))
    return True
