"""What is saved and restored, and how often. Imports nothing heavy; the trees are in `trees.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.bench.results import Operation

WARM = (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY)
FROM_THE_FIRST = (Operation.WARM_UP, Operation.FIRST_SAVE, Operation.FIRST_RESTORE)
MINUTES = "it would take minutes: see its time per leaf with 10,000 leaves"
EACH_A_FILE = "a file and an fsync for each leaf: see its time per leaf with 10,000 leaves"


@dataclass(frozen=True)
class Workload:
    """One tree and what is done with it."""

    name: str
    title: str
    operations: tuple[Operation, ...]
    rounds: int
    nbytes: int  #: about
    quick: float  #: part of the size in a quick run
    devices: int = 1
    in_shards: bool = False  #: whether each leaf is as many small shards as there are devices
    n_processes: int = 0  #: that save and restore together, with two devices each
    n_steps: int = 0  #: in a directory of steps, which is what is worked on then
    memory: bool = False  #: whether peak memory is measured, in a process for each operation
    stalls: bool = False  #: whether the event loop is watched
    all_ways: bool = False  #: whether managers take part, all of `penstock.orbax`, and copies of CPU memory
    cold: bool = False  #: whether each variant has a fresh process, with its loop watched from the first call
    fewer: Mapping[str, int] = field(default_factory=dict[str, int])  #: most rounds, by contender
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])  #: why, by contender


WORKLOADS = (
    Workload(
        "large",
        "1 GiB in 8 float32 arrays",
        (*WARM, Operation.METADATA, Operation.COLD_NUMPY, Operation.STEADY),
        rounds=4,
        nbytes=2**30,
        quick=1 / 8,
        memory=True,
        stalls=True,
    ),
    Workload(
        "half",
        "512 MiB in 8 float32 arrays, ten rounds",
        WARM,
        rounds=10,
        nbytes=2**29,
        quick=1 / 8,
        all_ways=True,
        fewer=dict.fromkeys(("Orbax", "Orbax async", "Orbax uncompressed", "Orbax manager"), 3),
        skipped={"numpy": "see the workload of 1 GiB"},
    ),
    Workload(
        "transformer",
        "a transformer's state: bfloat16 parameters, Adam moments in bfloat16 and float32",
        (*WARM, Operation.COLD_NUMPY),
        rounds=3,
        nbytes=2**29,
        quick=1 / 8,
        memory=True,
        all_ways=True,
    ),
    Workload(
        "small",
        "10,000 leaves of 1 KiB",
        (*WARM, Operation.METADATA),
        rounds=5,
        nbytes=10 * 2**20,
        quick=1 / 10,
        memory=True,
        stalls=True,
        all_ways=True,
        fewer={"Orbax": 2, "Orbax async": 2, "Orbax uncompressed": 1, "Orbax manager": 1, "numpy": 1},
    ),
    Workload(
        "first",
        "10,000 leaves of 1 KiB, from the first call of a process",
        (
            Operation.FIRST_SAVE,
            Operation.FIRST_RESTORE,
            Operation.SAVE,
            Operation.RESTORE_JAX,
            Operation.METADATA,
        ),
        rounds=3,
        nbytes=10 * 2**20,
        quick=1 / 10,
        stalls=True,
        cold=True,
    ),
    Workload(
        "many",
        "100,000 leaves of 1 KiB",
        (*WARM, Operation.METADATA),
        rounds=3,
        nbytes=100 * 2**20,
        quick=1 / 10,
        skipped={
            "Orbax": MINUTES,
            "Orbax async": MINUTES,
            "Orbax uncompressed": MINUTES,
            "numpy": EACH_A_FILE,
        },
    ),
    Workload(
        "million",
        "1,000,000 NumPy leaves of 64 bytes",
        (Operation.SAVE, Operation.RESTORE_NUMPY, Operation.METADATA),
        rounds=1,
        nbytes=64 * 10**6,
        quick=1 / 100,
        memory=True,
        skipped={
            "Orbax": MINUTES,
            "Orbax async": MINUTES,
            "Orbax uncompressed": MINUTES,
            "numpy": EACH_A_FILE,
        },
    ),
    Workload(
        "one",
        "one float32 leaf of 2 GiB",
        (*WARM, Operation.COLD_NUMPY),
        rounds=2,
        nbytes=2**31,
        quick=1 / 16,
    ),
    Workload(
        "sharded",
        "4 arrays sharded over 8 virtual devices",
        (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESHARD),
        rounds=3,
        nbytes=2**28,
        quick=1 / 4,
        devices=8,
    ),
    *[
        Workload(
            name,
            f"{n:,} leaves of 16 KiB, each sharded over 8 virtual devices",
            (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESHARD),
            rounds=5,
            nbytes=n * 2**14,
            quick=1 / 10,
            devices=8,
            in_shards=True,
            fewer={"Orbax": 1, "Orbax async": 1, "Orbax uncompressed": 1},
            skipped={"numpy": EACH_A_FILE},
        )
        for name, n in (("shards-1000", 1000), ("shards-4000", 4000))
    ],
    *[
        Workload(
            f"processes-{n}",
            f"4 arrays over the two devices of each of {n} processes",
            (Operation.SAVE, Operation.RESTORE_JAX),
            rounds=5,
            nbytes=2**27,
            quick=1 / 8,
            devices=2,
            n_processes=n,
        )
        for n in (1, 2, 4, 8)
    ],
    Workload(
        "changed",
        "100 arrays, of which 5 change between two saves",
        (Operation.SAVE, Operation.SECOND_SAVE),
        rounds=3,
        nbytes=500 * 2**20,
        quick=1 / 4,
    ),
    Workload(
        "beside",
        "192 MiB saved beside steps of training",
        (Operation.BESIDE_1, Operation.BESIDE_10),
        rounds=20,
        nbytes=192 * 2**20,
        quick=1 / 8,
    ),
    Workload(
        "steps",
        "a directory of steps, every second with metrics",
        (Operation.OPEN, Operation.LATEST, Operation.ALL_STEPS, Operation.BEST),
        rounds=5,
        nbytes=2**26,
        quick=1 / 10,
        n_steps=20_000,
        fewer={"Orbax": 1},
    ),
)
# For the harness's own test: five leaves, and everything but what takes its time.
TINY = Workload(
    "tiny",
    "five small arrays",
    (Operation.SAVE, Operation.RESTORE_NUMPY),
    rounds=1,
    nbytes=2**20,
    quick=1,
)
BY_NAME = {workload.name: workload for workload in (*WORKLOADS, TINY)}
