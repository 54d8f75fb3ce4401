"""Conversions by two processes from and to buckets, of whichever server the environment names."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from tests.processes.bucket_cases import CONVERTED, RULES, to_convert
from tests.processes.launcher import run_job

import penstock.sync


def conversions_agree(folder: Path) -> None:
    """Let two processes convert from and to buckets, and compare with what one makes."""
    penstock.sync.save(f"{CONVERTED}/source", to_convert())
    done = run_job(folder, 2, ["converts_from_and_to_buckets"])

    report = penstock.sync.convert(f"{CONVERTED}/source", folder / "alone", rules=RULES)
    alone = penstock.sync.restore(folder / "alone")
    for path in (f"{CONVERTED}/made", f"{CONVERTED}/again", folder / "converts_from_and_to_buckets" / "made"):
        jax.tree.map(np.testing.assert_array_equal, penstock.sync.restore(path), alone)
        assert penstock.sync.verify(path).intact

    first, second = done.results("converts_from_and_to_buckets")
    for written in zip(first["nbytes"], second["nbytes"], strict=True):
        assert sum(written) == report.nbytes
        assert max(written) < 0.6 * report.nbytes

    for result in (first, second):
        assert "save or convert in one process, or to Orbax's layout" in result["refused"]


def a_killed_conversion_is_made_again(folder: Path) -> None:
    """Kill one of two processes that convert to a bucket, and convert anew."""
    penstock.sync.save(f"{CONVERTED}/source", to_convert(), overwrite="delete-first")
    done = run_job(folder, 2, ["one_dies_converting_to_a_bucket"])
    result = done.result("one_dies_converting_to_a_bucket", 0)
    assert result == {"told": ["PeerSilentError", [1], "write"], "there": None}

    for target in (f"{CONVERTED}/killed", folder / "alone"):
        penstock.sync.convert(f"{CONVERTED}/source", target, rules=RULES)

    found, alone = (penstock.sync.restore(path) for path in (f"{CONVERTED}/killed", folder / "alone"))
    jax.tree.map(np.testing.assert_array_equal, found, alone)
