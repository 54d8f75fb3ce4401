"""The default pipelines of a save and of a restore, and how options change them."""

from __future__ import annotations

__all__ = (
    "FittedPipelines",
    "configured_pipeline",
    "fitting_pipeline",
    "given_pipeline",
    "prioritised",
    "restore_pipeline",
    "save_pipeline",
    "with_options",
)

from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast, final

from penstock.checkpointer.parts import CheckpointerParts
from penstock.config.config import FlowOptions
from penstock.kernel.errors import SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.messages.restore import RestoreOptions, RestoreRequest
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline, Slot
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun
from penstock.kernel.pipeline.stage import Stage
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.leaf import LeafPredicate
from penstock.kernel.registry import SCHEMES, StageRegistry
from penstock.stages.assemble import Assemble
from penstock.stages.commit import Commit
from penstock.stages.derive import Derive
from penstock.stages.device_to_host import DeviceToHost
from penstock.stages.encode import Encode
from penstock.stages.finalize import Finalize
from penstock.stages.flatten import Flatten
from penstock.stages.host_to_device import HostToDevice
from penstock.stages.limit_bytes import LimitBytes
from penstock.stages.link import Link
from penstock.stages.locate import Locate
from penstock.stages.plan import Plan
from penstock.stages.prioritise import Prioritise
from penstock.stages.read import Read
from penstock.stages.write import Write

RunT = TypeVar("RunT")
_Pair: TypeAlias = tuple[Pipeline[SaveRun], Pipeline[RestoreRun]]
STAGED_AHEAD = 4096
"""Messages that may wait behind `device_to_host`, so that a save is staged long before it is written. The
regulator bounds the bytes copied for them; leaves that are not copied cost none."""


UNLIMITED = 1 << 62  # bytes of a data file


def save_pipeline() -> Pipeline[SaveRun]:
    """Return the seven stages of a save, each with its default options."""
    return Pipeline(
        (
            Slot("flatten", Flatten(), Milestone.PLANNED),
            Slot("prioritise", Prioritise()),
            Slot("device_to_host", DeviceToHost(), Milestone.STAGED, queue=STAGED_AHEAD),
            Slot("limit_bytes", LimitBytes()),
            Slot("write", Write(), Milestone.WRITTEN, queue=1),
            Slot("commit", Commit(), Milestone.COMMITTED),
            Slot("finalize", Finalize()),
        )
    )


def fitting_pipeline(
    pipeline: Pipeline[SaveRun], layout: Layout, *, joint: bool = False, links: bool = False
) -> Pipeline[SaveRun]:
    """Return `pipeline` as saving in the format of a layout needs it.

    With a codec a stage `encode` follows `device_to_host`, and if several processes save together a stage
    `agree`, unless there is a stage of that name. The size of data files becomes an option of `write`.

    Args:
        pipeline: Of a save.
        layout: The format written.
        joint: Whether several processes save together.
        links: Whether a stage `link` follows, too: in a save that does without a base which is damaged.

    Raises:
        PipelineError, ConfigError: If the stage `write` has no such option.
    """
    if joint:
        from penstock.stages.agree import Agree  # one process needs nothing of it

        pipeline = _with_stage(pipeline, "agree", Agree())
    if layout.arrays is None:
        return pipeline

    if links:
        pipeline = _with_stage(pipeline, "link", Link())

    form = layout.arrays.save_format
    if form.leaf_codec is not None:
        pipeline = _with_stage(pipeline, "encode", Encode())

    size = form.ocdbt_target_data_file_size
    if size is None or not form.ocdbt:
        return pipeline

    return pipeline.configure("write", file_bytes=size or UNLIMITED)


def _without_idle(pipeline: Pipeline[SaveRun], layout: Layout) -> Pipeline[SaveRun]:
    """Return `pipeline` without the stage that encodes, if the layout has no codec."""
    is_coded = layout.arrays is not None and layout.arrays.save_format.leaf_codec is not None
    encodes = "encode" in pipeline.names and isinstance(pipeline["encode"], Encode)
    return pipeline.without("encode") if encodes and not is_coded else pipeline


def _with_stage(pipeline: Pipeline[SaveRun], name: str, stage: Stage[SaveRun]) -> Pipeline[SaveRun]:
    """Return `pipeline` with a stage for staged leaves, unless it has one of that name or stages none."""
    names = pipeline.names
    if name in names or "device_to_host" not in names:
        return pipeline

    # Behind any stages that the user put there: they see leaves before encoding.
    behind = next((name for name in ("encode", "limit_bytes", "write") if name in names), names[-1])
    slots: list[Slot[SaveRun]] = []
    for slot in pipeline:
        if slot.name == behind:
            slots.append(Slot(name, stage))

        slots.append(slot)

    return Pipeline(tuple(slots))


def restore_pipeline() -> Pipeline[RestoreRun]:
    """Return the stages of a restore, each with its default options."""
    return Pipeline(
        (
            Slot("locate", Locate()),
            Slot("plan", Plan()),
            Slot("prioritise", Prioritise()),
            Slot("limit_bytes", LimitBytes()),
            Slot("read", Read(), queue=1),
            Slot("host_to_device", HostToDevice()),
            Slot("assemble", Assemble()),
        )
    )


def prioritised(pipeline: Pipeline[RunT], first: LeafPredicate | None) -> Pipeline[RunT]:
    """Return `pipeline` with the leaves for which `first` is true in front."""
    return pipeline if first is None else pipeline.configure("prioritise", first=first)


def with_options(
    given: Pipeline[RestoreRun], options: RestoreOptions, *, is_checked: bool
) -> tuple[Pipeline[RestoreRun], RestoreOptions]:
    """Return a pipeline with the options that are its stages', and all options as they then hold.

    Without a wish to verify, the option of the stage `read` counts. Where leaves may be computed, a stage
    `derive` comes before `assemble`.

    Args:
        given: The pipeline.
        options: All options of the restore.
        is_checked: Whether its stages were compared before, as those of a Checkpointer are when it is made.

    Raises:
        PipelineError: If the stages do not fit each other, or one is absent that an option is for.
    """
    pipeline = given if options.prioritise is None else prioritised(given, options.prioritise)
    if options.max_expansion is not None:
        pipeline = pipeline.configure("plan", max_expansion=options.max_expansion)
    read = pipeline["read"] if "read" in pipeline.names else None
    if isinstance(read, Read):
        if options.verify is not None:
            pipeline = pipeline.replace("read", replace(read, verify=options.verify))
        elif not read.verify:
            options = replace(options, verify=False)

    if pipeline is not given or not is_checked:
        pipeline.check(RestoreRequest)  # first: the error is about the stages that the caller chose
    if options.makes_leaves and "derive" not in pipeline.names:
        pipeline = pipeline.insert_before("assemble", Derive(), called="derive")

    return pipeline, options


def configured_pipeline(pipeline: Pipeline[RunT], options: FlowOptions) -> Pipeline[RunT]:
    """Return `pipeline` as configured: its stages by name, then their options.

    A name in `options.stages` means the stage of that name in `pipeline`, with its milestone, or
    one that a distribution offers under the entry-point group `penstock.stages`.

    Raises:
        PipelineError: If a name is unknown or occurs twice.
        ConfigError: If a stage has no such option, or a value does not fit.
    """
    if options.stages is not None:
        ours = {slot.name: slot for slot in pipeline}
        plugged_in: StageRegistry[Stage[Any]] = StageRegistry(
            {slot.name: type(slot.stage) for slot in pipeline}
        )
        slots = [
            ours[name] if name in ours else Slot(name, plugged_in.create(name)) for name in options.stages
        ]
        pipeline = Pipeline(tuple(slots))

    return pipeline.configured(options.stage_options)


def given_pipeline(given: Pipeline[RunT]) -> Pipeline[RunT]:
    """Return the pipeline that the caller gave.

    Raises:
        SpecError: If what was given is no pipeline.
    """
    if not isinstance(cast("object", given), Pipeline):
        raise SpecError(f"a pipeline must be a penstock.Pipeline, not {given!r}")

    return given


@final
class FittedPipelines:
    """The pipelines of a Checkpointer, as its configuration, its layout and a store need them.

    Args:
        parts: The caller's pipelines, or None, and the options.
        layout: The format written.
        joint: Whether several processes save together.

    Raises:
        SpecError: If a pipeline is none.
        PipelineError, ConfigError: If stages do not fit each other, or an option of one does not.
    """

    __slots__ = ("_by_concurrency", "_given", "_joint", "_layout", "_parts", "local")

    def __init__(self, parts: CheckpointerParts, layout: Layout, *, joint: bool) -> None:
        if parts.save_pipeline is not None:
            given_pipeline(parts.save_pipeline)
        if parts.restore_pipeline is not None:
            given_pipeline(parts.restore_pipeline)

        self._parts = parts
        self._layout = layout
        self._joint = joint
        self._by_concurrency: dict[int, _Pair] = {}
        self._given: BoundedCache[tuple[ByIdentity, bool, bool], Pipeline[SaveRun]] = BoundedCache(4)
        self.local = self._fitted(save_pipeline(), restore_pipeline())
        for scheme in SCHEMES.own:  # now, or an option that does not fit would be found by the first call
            self.of_scheme(scheme)

    def of_scheme(self, scheme: str) -> _Pair:
        """Return those for what is in a bucket."""
        # What waits for a network needs more threads than what waits for a disk.
        at_once = self._parts.config.store.of_scheme(scheme).concurrency
        if at_once not in self._by_concurrency:
            self._by_concurrency[at_once] = self._fitted(
                save_pipeline().configure("write", concurrency=at_once),
                restore_pipeline().configure("read", concurrency=at_once),
            )

        return self._by_concurrency[at_once]

    def for_layout(self, layout: Layout) -> FittedPipelines:
        """Return the same pipelines, of those who save with another layout."""
        other = copy(self)
        other._layout, other._given = layout, BoundedCache(4)

        def refitted(fitted: _Pair) -> _Pair:
            return _without_idle(fitting_pipeline(fitted[0], layout, joint=self._joint), layout), fitted[1]

        other.local = refitted(self.local)
        other._by_concurrency = {n: refitted(each) for n, each in self._by_concurrency.items()}
        return other

    def for_save(
        self, given: Pipeline[SaveRun], layout: Layout, *, joint: bool, links: bool
    ) -> Pipeline[SaveRun]:
        """Return the pipeline of a save as a layout needs it; see `fitting_pipeline`.

        It is fitted and checked once: callers give the same one for each of their saves.

        Raises:
            SpecError: If it is none.
            PipelineError, ConfigError: If its stages do not fit each other, or an option of one does not.
        """

        def fitted() -> Pipeline[SaveRun]:
            pipeline = fitting_pipeline(given_pipeline(given), layout, joint=joint, links=links)
            pipeline.check(TreeToSave)
            return pipeline

        return self._given.get_or_make((ByIdentity(given, layout), joint, links), fitted, lambda _: 0)

    def _fitted(self, saving: Pipeline[SaveRun], restoring: Pipeline[RestoreRun]) -> _Pair:
        """Return the caller's pipelines, or those for where there are none, with all that is configured."""
        parts = self._parts
        saving = saving if parts.save_pipeline is None else parts.save_pipeline
        saving = fitting_pipeline(saving, self._layout, joint=self._joint)
        saving = configured_pipeline(saving, parts.config.save)
        restoring = restoring if parts.restore_pipeline is None else parts.restore_pipeline
        restoring = configured_pipeline(restoring, parts.config.restore)
        saving.check(TreeToSave)
        restoring.check(RestoreRequest)
        return saving, restoring
