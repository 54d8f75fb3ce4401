"""Breaks what a job with tiers runs on, at random moments, and looks at what the next job resumes from.

Eight processes on four hosts save one step after another into memory, which other hosts have a copy of, into
disks of their own, and into a root: a file system that all see, or a bucket. Then something breaks

* `trainer`: some processes are killed, and the others after them,
* `keeper`: some keepers are killed, and the job goes on,
* `both`: a keeper with all processes of its host,
* `host`: as many hosts as the job has peers, with memory and disk,
* `link`: a host is cut off from the others for a while, and the job goes on,
* `disk`: a disk is full, or refuses to write, for a while, and the job goes on,
* `bucket`: it refuses, hangs or is slow for a while, and the job goes on,
* `silence`: one process is killed, and the others say which,
* `all`: all processes are killed, and no job comes: the keepers bring the newest step to the root,

and sooner or later the job is killed. The next one has its processes on other hosts, so that most find parts
of others there, and meets what the keepers have begun. All its processes must find the same step, with the
values that each of them saved as that step and no others, and it must be

* no older than the last one that was durable in the root,
* no older than the last one that any process called kept, if all keepers live,
* if hosts or keepers are lost, no older than the last one of which each process has its part on a disk, in a
  keeper or at a peer that is left.

No save fails because of a keeper, a link, a disk or the bucket, and the state is overwritten as soon as it is
staged. `make tiers-proof`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Final

import anyio
import numpy as np
from tests.cloud.servers import program
from tests.proofs.crash_loop import LOADED, fork
from tests.proofs.tier_hosts import Host, Network, Relay, Services, Training, bucket_server, has_namespaces

from penstock import CheckpointManager, JobOptions, PerProcess, SaveFormat, SaveFuture
from penstock.config import Config, JobLimits, StoreOptions
from penstock.errors import PeerError, PenstockError
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.layouts.discovery import look_at
from penstock.handlers.stores.buckets import S3Options
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.steps import Disk, KeepLast, Memory
from penstock.steps.peers import Peer, chosen_peers
from penstock.stores.store_finder import store_at

LIMITS: Final = JobLimits(join_s=45.0, write_s=120.0, silence_s=15.0)
SIZE: Final = 20_000
FROZEN: Final = np.arange(100_000, dtype=np.float32)
"""It does not change from step to step, and so is linked."""

LEASE_S: Final = 2.0
FINISHED_S: Final = 300.0
REAL_EACH: Final = 10
"""Of so many jobs one finds lost keepers replaced by programs that are started. Others are forks."""

CODED_EACH: Final = 5
"""Of so many jobs one has a codec. Its processes start what encodes their parts, which takes long."""

AFTER: Final = 3
"""So many steps are kept after what breaks for a while, by each process."""


@dataclass(frozen=True)
class Setting:
    """What a job of a world is made with; the same for all its processes."""

    root: str
    number: int  #: of the job
    peers: int
    n_processes: int
    services: Services
    codec: str = "none"

    def state(self, step: int, index: int) -> dict[str, object]:
        """Return what a process saves as a step."""
        own = PerProcess(np.full(2000 * (index + 1), 10 * step + index))
        return {"w": np.full(SIZE, step, np.float32), "n": step, "own": own, "frozen": FROZEN}


async def train(setting: Setting, host: Host, index: int, out: int) -> None:
    """Resume, check what was found, and save one step after another, until something fails."""

    def say(what: str, told: object) -> None:
        os.write(out, f"{what} {told}\n".encode())  # one write, so that lines are in order

    host.enter()
    logger = logging.getLogger("penstock")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Events(say))
    keeper = KeeperOptions(socket=host.door)
    config = Config(
        store=StoreOptions(keeper=keeper, s3=S3Options(lease_s=LEASE_S)),
        job=JobOptions(local_root=str(host.disk / f"p{index}")),
    )
    tiers: list[Memory | Disk] = [
        Memory(keep=2, peers=setting.peers),
        Disk(host.disk / f"p{index}" / "near", keep=2),
    ]
    try:
        service = setting.services.connected(setting.number)
        coordinator = JobCoordinator(service, index, setting.n_processes, LIMITS)
        async with CheckpointManager(
            setting.root,
            tiers=tiers,
            keep=KeepLast(3),
            coordinator=coordinator,
            config=config,
            save_format=SaveFormat(codec=setting.codec),
        ) as manager:
            await _train(setting, manager, index, say)
    except PenstockError as error:
        blamed = error.processes if isinstance(error, PeerError) else (index,)
        say("raised", f"{','.join(map(str, blamed))} {error!r}".replace("\n", " "))
        await anyio.sleep_forever()


async def _train(
    setting: Setting, manager: CheckpointManager, index: int, say: Callable[[str, object], None]
) -> None:
    latest = manager.latest_step()
    if latest is not None:
        found, expected = await manager.restore(like=setting.state(0, index)), setting.state(latest, index)
        assert found["n"] == latest, f"step {latest} holds step {found['n']}"
        for name in ("w", "frozen"):
            np.testing.assert_array_equal(found[name], expected[name])

        np.testing.assert_array_equal(found["own"].value, expected["own"].value)  # type: ignore[attr-defined]

    say("resumed", -1 if latest is None else latest)
    for step in range((-1 if latest is None else latest) + 1, 10**9):
        state = setting.state(step, index)
        save = await manager.save(step, state, compare="digest")  # so that what did not change is linked
        assert save is not None
        state["w"][:] = -1  # type: ignore[index]  # as a training does that donates its state
        save.add_done_callback(partial(_say_durable, say, step))
        await save.kept()
        say("kept", step)


def _say_durable(say: Callable[[str, object], None], step: int, done: SaveFuture) -> None:
    if done.exception() is None:
        say("root", step)


class _Events(logging.Handler):
    """Says where steps have come to, and what was refused."""

    def __init__(self, say: Callable[[str, object], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        fields: Mapping[str, object] = getattr(record, "penstock", {})
        match fields.get("event"):
            case "step.peer_kept":
                self._say("sent", fields["step"])
            case "step.promoted" if str(fields["tier"]).endswith("/near"):
                self._say("disk", fields["step"])
            case event if record.levelno >= logging.WARNING:
                self._say("event", f"{event} {fields}".replace("\n", " "))
            case _:
                pass


@dataclass(frozen=True)
class Found:
    """What the processes of a job have said, in the end."""

    resumed: int
    kept: int  #: the newest step that any of them called kept
    disk: int
    sent: int  #: the newest step that each process has sent to all its peers; -1 for none
    durable: int


def promised(found: Found, hosts: Sequence[int], lost: Lost, peers: Sequence[Sequence[int]]) -> int:
    """Return the step that the next job must find at least. Pure.

    A keeper has the two steps that were kept last, and the last one that all have sent to all their peers,
    as those have. Of what only some have sent nothing follows: a peer may have dropped it for a newer one.

    Args:
        found: What the processes have said.
        hosts: Where each process was.
        lost: What is gone.
        peers: To which hosts each process sends.
    """
    kept = {found.kept, found.kept - 1} if found.kept > found.resumed else {found.kept}
    places = [
        (kept | {found.sent} if host not in lost.keepers else set[int]())
        | ({found.disk} if host not in lost.disks else set[int]())
        | ({found.sent} if not lost.keepers.issuperset(peers[index]) else set[int]())
        for index, host in enumerate(hosts)
    ]
    return max([found.durable, *set.intersection(*places)])


@dataclass
class Lost:
    """The hosts whose keepers, and whose disks, are gone."""

    keepers: set[int] = field(default_factory=set[int])
    disks: set[int] = field(default_factory=set[int])


class World:
    """Hosts and a root, and one job after another.

    Args:
        folder: For the hosts.
        root: Of the run.
        network: That hosts are on; None if there is none.
        first: The number of the first host.
        services: Of the jobs.
        bucket: Before the bucket that the root is in; None if it is a folder.
        counts: How many hosts, and processes.
    """

    def __init__(
        self,
        folder: Path,
        root: str,
        network: Network | None,
        first: int,
        services: Services,
        bucket: Relay | None,
        counts: tuple[int, int],
    ) -> None:
        n_hosts, self.n_processes = counts
        self.hosts = [Host(folder, first + number, network) for number in range(n_hosts)]
        self.root, self.services, self.bucket = root, services, bucket
        self.has_network = network is not None
        self.floor = self.durable = -1
        self.n_lost = Counter[
            int
        ]()  #: steps that were kept and not found again, when a host or a keeper went

    def faults(self) -> Sequence[str]:
        """Return what may break here."""
        more = ["link", "disk"] if self.has_network and len(self.hosts) > 1 else []
        more += ["bucket"] if self.bucket is not None else []
        return ["trainer", "keeper", "both", "host", *more]

    def close(self) -> None:
        """End it."""
        for host in self.hosts:
            host.close()


class Round:
    """One job in a world, from its start to its end, and what breaks meanwhile.

    Args:
        world: Where.
        number: Of the job.
        rng: Chooses.
        places: The host of each process; by default any.
        n_peers: To how many hosts each step is sent; by default any number.
        coded_each: Of so many jobs one has a codec, by its number; 0: none.
    """

    def __init__(
        self,
        world: World,
        number: int,
        rng: random.Random,
        places: Sequence[int] | None = None,
        n_peers: int | None = None,
        coded_each: int = 0,
    ) -> None:
        self._world, self._rng = world, rng
        n_hosts = len(world.hosts)
        spread = [index % n_hosts for index in range(world.n_processes)]
        self._places = rng.sample(spread, len(spread)) if places is None else list(places)
        self._lost = Lost()
        self._began = time.monotonic()
        self.recovery_s = 0.0  #: from the start of the job until all its processes have resumed
        self._n_peers = min(rng.choice((1, 1, 2)), n_hosts - 1) if n_peers is None else n_peers
        codec = "zstd:1" if coded_each and number % coded_each == 0 else "none"
        setting = Setting(world.root, number, self._n_peers, world.n_processes, world.services, codec)
        for host in world.hosts:
            host.start(forked=bool(number % REAL_EACH))
        for host in world.hosts:
            host.wait_started()

        self._jobs = [
            Training(partial(train, setting, world.hosts[place], index))
            for index, place in enumerate(self._places)
        ]

    def run(self, fault: str) -> None:
        """Let it resume and save, and break something.

        Raises:
            AssertionError: If anything is not as it must be.
        """
        world, rng = self._world, self._rng
        try:
            for job in self._jobs:
                job.hear("resumed")

            self.recovery_s = time.monotonic() - self._began
            resumed = {job.steps("resumed")[0] for job in self._jobs}
            assert len(resumed) == 1, f"the processes resumed from different steps: {resumed}"
            assert min(resumed) >= world.floor, f"{resumed} was found, where {world.floor} is promised"
            self._jobs[0].hear("kept", rng.randrange(1, 4))
            if self._n_peers and fault in {"host", "both"}:
                for job in self._jobs:
                    job.hear("sent", self._n_peers)

            time.sleep(rng.random() * 0.2)  # the moment is what is random here
            getattr(self, f"_{fault}")()
        except AssertionError as failure:
            for index, job in enumerate(self._jobs):
                job.kill()
                failure.add_note(f"process {index} on host {self._places[index]}: {job.said}")

            raise
        finally:
            for job in rng.sample(self._jobs, len(self._jobs)):
                job.kill()

        self._note()

    def course(self) -> dict[str, object]:
        """Return where the processes were, what was lost, and what was said, for a log."""
        return {
            "places": list(self._places),
            "peers": self._n_peers,
            "lost": [sorted(self._lost.keepers), sorted(self._lost.disks)],
            "floor": self._world.floor,
            "recovery_s": round(self.recovery_s, 1),
            "took_s": round(time.monotonic() - self._began, 1),
            "said": [job.said for job in self._jobs],
        }

    def _note(self) -> None:
        """Note what the next job must find."""
        world = self._world
        said = {what: [job.steps(what) for job in self._jobs] for what in ("kept", "disk", "root", "sent")}
        resumed = self._jobs[0].steps("resumed")[0]
        newest = {what: max(chain([-1], *steps)) for what, steps in said.items()}
        world.durable = max(world.durable, newest["root"])
        sent = _sent_by_all(said["sent"], self._n_peers)
        found = Found(resumed, max(resumed, newest["kept"]), newest["disk"], sent, world.durable)
        addresses = {index: Peer(str(place), "", 0) for index, place in enumerate(self._places)}
        peers = [
            [self._places[to] for to in chosen_peers(index, addresses, self._n_peers)] for index in addresses
        ]
        world.floor = promised(found, self._places, self._lost, peers)
        if self._lost.keepers:
            world.n_lost[found.kept - world.floor] += 1

    def _goes_on(self, n: int = AFTER) -> None:
        """Hear that all processes keep some steps more, and that nothing was raised."""
        for job in self._jobs:
            job.hear("kept", n)

        raised = [rest for job in self._jobs for what, rest in job.said if what == "raised"]
        assert not raised, f"a save failed: {raised}"

    def _some_hosts(self, most: int) -> list[int]:
        return self._rng.sample(range(len(self._world.hosts)), self._rng.randrange(1, most + 1))

    def _nobody(self) -> None:
        self._goes_on()

    def _trainer(self) -> None:
        for job in self._rng.sample(self._jobs, self._rng.randrange(1, len(self._jobs) + 1)):
            job.kill()

        time.sleep(self._rng.random() * 0.5)  # the others go on beside what these have left

    def _keeper(self) -> None:
        for number in self._some_hosts(len(self._world.hosts)):
            self._world.hosts[number].lose_keeper()
            self._lost.keepers.add(number)

        self._goes_on()

    def _both(self) -> None:
        self._lose_hosts(with_disk=False)

    def _host(self) -> None:
        self._lose_hosts(with_disk=True)

    def _lose_hosts(self, *, with_disk: bool) -> None:
        for number in self._some_hosts(max(self._n_peers, 1)):
            self._world.hosts[number].lose_keeper()
            self._lost.keepers.add(number)
            for job, place in zip(self._jobs, self._places, strict=True):
                if place == number:
                    job.kill()

            if with_disk:
                self._world.hosts[number].lose()
                self._lost.disks.add(number)

        time.sleep(self._rng.random() * 0.5)

    def _link(self) -> None:
        cut = [self._world.hosts[number] for number in self._some_hosts(len(self._world.hosts) - 1)]
        for host in cut:
            host.pull_cable(out=True)
        try:
            self._goes_on()
        finally:
            for host in cut:
                host.pull_cable(out=False)

        self._goes_on(1)

    def _disk(self) -> None:
        hosts = [self._world.hosts[number] for number in self._some_hosts(2)]
        for host in hosts:
            self._rng.choice((host.fill_disk, host.forbid_disk))()
        try:
            self._goes_on()
        finally:
            for host in hosts:
                host.free_disk()

        self._goes_on(1)

    def _bucket(self) -> None:
        relay = self._world.bucket
        assert relay is not None
        relay.make(self._rng.choice(("refuses", "hangs", "slow")))
        try:
            self._goes_on()
        finally:
            relay.make("none")

        self._goes_on(1)

    def _silence(self) -> None:
        index = self._rng.randrange(len(self._jobs))
        self._jobs[index].kill()
        for job in self._jobs:
            if not job.is_over:
                job.hear("raised")

        raised = [rest for job in self._jobs for what, rest in job.said if what == "raised"]
        wrong = [rest for rest in raised if rest.split()[0] != str(index)]
        assert not wrong, f"process {index} was killed, and it was said: {wrong}"

    def _all(self) -> None:
        for job in self._jobs:
            job.kill()

        kept = max([step for job in self._jobs for step in (*job.steps("resumed"), *job.steps("kept"))])
        until = time.monotonic() + FINISHED_S
        while (found := _latest_in(self._world.root, self._world.hosts[0])) < kept:
            assert time.monotonic() < until, f"{found} is in the root, and {kept} was kept by all"
            time.sleep(0.5)

        self._world.durable = max(self._world.durable, found)


def _sent_by_all(sent: Sequence[Sequence[int]], n_peers: int) -> int:
    """Return the newest step that each process has sent to each of so many peers; -1 if there is none."""
    if not n_peers:
        return -1

    whole = [{step for step, n in Counter(steps).items() if n >= n_peers} for steps in sent]
    return max(set.intersection(*whole), default=-1)


def _latest_in(root: str, host: Host) -> int:
    """Return the newest step of a root, as another process sees it, on a host; -1 for none."""
    read, write = os.pipe()

    def look(out: int) -> None:
        host.enter()  # only hosts reach the bucket
        with suppress(PenstockError):
            steps = [int(name) for name in look_at(store_at(root), root).steps]
            os.write(out, str(max(steps, default=-1)).encode())

    child = fork(look, write)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()

    os.waitpid(child, 0)
    return int(said or -1)


RARE: Final[Mapping[str, float]] = {"silence": 0.02, "all": 0.02}
"""What takes long, and how often it is chosen."""


def chosen_fault(world: World, rng: random.Random, among: Sequence[str]) -> str:
    """Choose what breaks."""
    for fault, share in RARE.items():
        if fault in among and rng.random() < share:
            return fault

    often = [fault for fault in world.faults() if fault in among]
    return rng.choice(often or [fault for fault in RARE if fault in among])


def main(given: Sequence[str] | None = None) -> int:
    """Break everything so many times; return 0, or raise at the first job that does not find what it must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--coded-each", type=int, default=CODED_EACH, help="of so many jobs one has a codec")
    parser.add_argument("--only", nargs="*", help="faults to choose among")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--log", type=Path, help="a file to note the course of each job in, a line of JSON")
    parser.add_argument(
        "--bucket", type=float, default=0.2, help="the share of jobs whose root is in a bucket"
    )
    options = parser.parse_args(given)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and leave nothing
    network = Network() if has_namespaces() else None
    weed = program("weed") if options.bucket else None
    sys.stdout.write(
        f"{options.processes} processes on {options.hosts} hosts, "
        + (
            "each a network namespace; "
            if network
            else "no network namespaces here: no faults of links, disks; "
        )
        + ("root: a folder, or a bucket of SeaweedFS\n" if weed else "root: a folder, and no bucket\n")
    )
    with ExitStack() as stack:
        base = "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"
        made = Path(tempfile.mkdtemp(prefix="pk-", dir=base))
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(made / "pyc")  # keepers start again and again
        if network is not None:
            stack.callback(network.close)

        import_all(made)
        services = Services(made)
        stack.callback(services.close)
        counts = options.hosts, options.processes
        worlds = [World(made, str(made / "root"), network, 10, services, None, counts)]
        stack.callback(worlds[0].close)
        if weed is not None:
            (made / "weed").mkdir()
            server = stack.enter_context(bucket_server(made / "weed"))
            relay = Relay(int(server.endpoint.rpartition(":")[2]), network)
            stack.callback(relay.close)
            os.environ.update(server.environ(relay.endpoint))
            root = f"{server.bucket}/{uuid.uuid4().hex[:8]}"
            worlds.append(World(made, root, network, 30, services, relay, counts))
            stack.callback(worlds[1].close)

        break_all(worlds, options, random.Random(seed))

    return 0


def import_all(folder: Path) -> None:
    """Import what a training imports, so that none has to. One that is forked for that finds out what."""
    for name in (*LOADED, "obstore.store", "penstock.steps.peers", "penstock.steps.finishing"):
        import_module(name)

    read, write = os.pipe()

    async def try_out(out: int) -> None:
        host = Host(folder, 0, None)
        host.start(forked=False)  # it would be in this loop
        host.wait_started()
        try:
            os.environ["PENSTOCK_STORE__KEEPER__SOCKET"] = host.socket
            tiers: list[Memory | Disk] = [Memory(), Disk(host.disk / "near")]
            async with CheckpointManager(folder / "tried", tiers=tiers) as manager:
                for step in (1, 2):
                    save = await manager.save(step, {"w": np.full(SIZE, step), "frozen": FROZEN})
                    assert save is not None
                    await save

                await manager.restore()
        finally:
            host.close()

        names = [name for name in sys.modules if name.startswith("penstock.")]
        os.write(out, " ".join(names).encode())

    child = fork(lambda out: anyio.run(try_out, out), write)
    os.close(write)
    with os.fdopen(read) as told:
        names = told.read().split()

    os.waitpid(child, 0)
    assert names, "a training that is tried out fails"
    for name in names:
        import_module(name)

    gc.collect()
    gc.freeze()  # or the collector of each fork would touch all of it, and so copy its pages


def break_all(worlds: Sequence[World], options: argparse.Namespace, rng: random.Random) -> None:
    """Run one job after another, and say what was found."""
    counts, longest, began = Counter[str](), defaultdict[str, float](float), time.monotonic()
    for number in range(options.faults):
        world = worlds[-1] if rng.random() < options.bucket else worlds[0]
        among = options.only or [*world.faults(), *RARE]
        if not set(among) & {*world.faults(), *RARE}:
            world = worlds[-1]

        fault = chosen_fault(world, rng, among)
        job = Round(world, number, rng, coded_each=options.coded_each)
        try:
            job.run(fault)
        except AssertionError as failure:
            failure.add_note(f"fault {number}: {fault}, in {world.root}")
            raise
        finally:
            if options.log is not None:
                course = {"number": number, "fault": fault, "root": world.root, **job.course()}
                with options.log.open("a") as log:
                    log.write(json.dumps(course) + "\n")

        counts[fault] += 1
        longest[fault] = max(longest[fault], job.recovery_s)
        if (number + 1) % 10 == 0:
            sys.stdout.write(f"{number + 1} faults, {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()

    for what, n in sorted(counts.items()):
        sys.stdout.write(f"{n:5} {what:8} found again within {longest[what]:.1f} s\n")
    for world in worlds:
        lost = ", ".join([f"{steps}: {n}" for steps, n in sorted(world.n_lost.items())])
        sys.stdout.write(f"{world.root}: steps lost with keepers or hosts, and how often: {lost or 'none'}\n")

    sys.stdout.write(f"{options.faults} faults, {options.faults} recoveries\n")


if __name__ == "__main__":
    sys.exit(main())
