"""The manager under random saves, deletions, losses of power and reopenings, against a dict."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.own_files import listed

from penstock.config import Config
from penstock.errors import OlderStepError, PenstockError, StepExistsError, StorageError
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager, KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, StepInfo
from penstock.steps.keep_policies import steps_to_delete
from penstock.testing import CrashStore

POLICIES: list[KeepPolicy] = [
    KeepAll(),
    KeepLast(1),
    KeepLast(2) | KeepEvery(4),
    KeepBest(2, "loss", without_metric=False),
    KeepLast(1) | KeepBest(1, "loss", "max"),
]
FROZEN = np.arange(3000.0)
QUIET = Config.load(environ={}, arguments={"telemetry": {"keep_reports": 0}})
"""A power loss comes after a number of changes, among which reports are written at any time."""


class ManagerMachine(RuleBasedStateMachine):
    """What lies on the medium is what the model says, whole, after whatever happened."""

    backend = "asyncio"

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.root = Path(self.folder) / "run"
        self.root.mkdir()
        self.portal = self.stack.enter_context(start_blocking_portal(self.backend))
        self.model: dict[int, tuple[int, float]] = {}  # step: fill, loss
        self.fill = 0

    @initialize(policy=st.sampled_from(POLICIES), trash=st.sampled_from([None, "old"]))
    def begin(self, policy: KeepPolicy, trash: str | None) -> None:
        self.policy, self.trash = policy, trash
        self.open()

    def open(self) -> None:
        self.store = CrashStore(LocalStore(io="buffered"), self.root)
        self.manager = CheckpointManager(
            self.root, keep=self.policy, trash=self.trash, store=self.store, metric="loss", config=QUIET
        )
        self.life = self.portal.wrap_async_context_manager(self.manager)
        self.life.__enter__()

    def items(self, step: int, fill: int) -> dict[str, Any]:
        return {"w": np.full(50, fill), "frozen": FROZEN, "step": step}

    async def save(self, step: int, fill: int, loss: float, **options: Any) -> None:
        items = self.items(step, fill)
        save = await self.manager.save(step, items, metrics={"loss": loss}, compare="digest", **options)
        assert save is not None
        await save

    def kept(self, model: dict[int, tuple[int, float]], saved: int) -> dict[int, tuple[int, float]]:
        infos = [StepInfo(step, 0.0, {"loss": loss}) for step, (_, loss) in sorted(model.items())]
        gone = steps_to_delete(self.policy, infos, 0.0, {saved})
        return {step: what for step, what in model.items() if step not in gone}

    @rule(ahead=st.integers(1, 4), loss=st.integers(0, 5))
    def save_next(self, ahead: int, loss: int) -> None:
        step = max(self.model, default=0) + ahead
        self.fill += 1
        self.portal.call(self.save, step, self.fill, float(loss))
        self.model = self.kept({**self.model, step: (self.fill, float(loss))}, step)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), loss=st.integers(0, 5))
    def overwrite(self, data: st.DataObject, loss: int) -> None:
        step = data.draw(st.integers(0, max(self.model)))
        with pytest.raises((StepExistsError, OlderStepError)):
            self.portal.call(self.save, step, 0, 0.0)

        self.fill += 1
        self.portal.call(lambda: self.save(step, self.fill, float(loss), overwrite=True))
        self.model = self.kept({**self.model, step: (self.fill, float(loss))}, step)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        # Until a policy has decided, in the background, a step that it will not keep may become the last one.
        self.portal.call(self.manager.wait)
        self.portal.call(self.manager.delete, step)
        del self.model[step]

    @rule()
    def reopen(self) -> None:
        self.life.__exit__(None, None, None)
        self.open()

    @rule()
    def reload(self) -> None:
        self.portal.call(self.manager.wait)
        self.portal.call(self.manager.reload)

    @rule(changes=st.integers(0, 40), ahead=st.integers(1, 4), loss=st.integers(0, 5))
    def lose_power(self, changes: int, ahead: int, loss: int) -> None:
        self.portal.call(self.manager.wait)
        before = dict(self.model)
        step = max(before, default=0) + ahead
        self.fill += 1
        after = {**before, step: (self.fill, float(loss))}
        self.store.stop_after(self.store.n_changes + changes)
        durable = False
        with suppress(PenstockError):
            self.portal.call(self.save, step, self.fill, float(loss))
            durable = True
        with suppress(PenstockError):
            self.life.__exit__(None, None, None)

        self.store.lose_power()
        self.open()
        found = set(self.manager.all_steps())
        assert found <= set(after)
        assert set(self.kept(after, step)) - {step} <= found
        if durable or not before:
            assert not durable or step in found
        else:
            assert max(before) in found or step in found
        if step not in found:
            assert found == set(before)

        self.model = {number: after[number] for number in found}

    def teardown(self) -> None:
        with suppress(StorageError):
            self.life.__exit__(None, None, None)

        self.stack.close()

    def check(self) -> None:
        self.portal.call(self.manager.wait)
        assert list(self.manager.all_steps()) == sorted(self.model)
        names = set(listed(self.root, [] if self.trash is None else [self.trash]))
        assert names == {str(step) for step in self.model}
        for step, (fill, _) in self.model.items():
            found = self.portal.call(self.manager.restore, step)
            assert found["step"] == step
            assert np.array_equal(found["w"], np.full(50, fill))
            assert np.array_equal(found["frozen"], FROZEN)

        losses = [(loss, -step) for step, (_, loss) in self.model.items()]
        assert self.portal.call(self.manager.best_step) == (-min(losses)[1] if losses else None)

    @rule()
    def look(self) -> None:
        self.check()


class TrioMachine(ManagerMachine):
    backend = "trio"


budget = settings(
    max_examples=5,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestOnAsyncio = pytest.mark.timeout(110)(ManagerMachine.TestCase)
TestOnAsyncio.settings = budget
TestOnTrio = pytest.mark.timeout(110)(TrioMachine.TestCase)
TestOnTrio.settings = budget
