"""Starts the jobs, and compares what they say: `make demo-processes`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes_demo.member import KILLED_AT, STEPS

DEVICES = 4
KILLED = 2
MOST_S = 120.0


def start(count: int, root: Path, killed: int | None = None) -> list[Any]:
    """Run a job of `count` processes, with four devices in all; return what each said, None if it died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    flags = f"--xla_force_host_platform_device_count={DEVICES // count} --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": flags}
    who = "" if killed is None else str(killed)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "processes_demo.member", str(rank), str(count), str(port), str(root), who],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if killed is not None else None,
            env=environment,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=MOST_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    # Beside events, which are printed unless a program configures structlog.
    results = [[line for line in text.splitlines() if line.startswith("{")] for text in said]
    return [json.loads(lines[-1]) if lines else None for lines in results]


def main() -> int:
    """Run the demo; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        _say(f"Four processes train to step {STEPS}, undisturbed.")
        whole = start(4, Path(folder, "undisturbed"))
        _say(f"Four more do the same. Process {KILLED} is killed in the middle of saving step {KILLED_AT}.")
        broken = start(4, Path(folder, "run"), KILLED)
        for rank, result in enumerate(broken):
            said = "is dead" if result is None else f"raised {result.get('error')}: {result.get('says')}"
            _say(f"  process {rank} {said}")

        left = [path.name for path in Path(folder, "run").iterdir() if path.is_dir()]
        _say(f"  there is: {', '.join(sorted(left))}")
        _say("Two processes go on, with twice the devices each.")
        resumed = start(2, Path(folder, "run"))

    return _compare(whole, broken, resumed)


def _compare(whole: list[Any], broken: list[Any], resumed: list[Any]) -> int:
    begin = resumed[0]["from"]
    wanted = {step: loss for step, loss in whole[0]["losses"].items() if int(step) > begin}
    named = all(f"process {KILLED}" in result["says"] for result in broken if result is not None)
    same_losses = all(result["losses"] == wanted for result in resumed)
    expected = {place: one for result in whole for place, one in result["digest"].items()}
    same_state = expected == {place: one for result in resumed for place, one in result["digest"].items()}
    _say(
        f"  resumed from step {begin}; losses {_are(same_losses)}, parameters and moments {_are(same_state)}"
    )
    good = named and same_losses and same_state and broken[KILLED] is None
    _say("All as it should be." if good else "Something is WRONG.")
    return 0 if good else 1


def _are(same: bool) -> str:
    return "bit for bit the same" if same else "DIFFERENT"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
