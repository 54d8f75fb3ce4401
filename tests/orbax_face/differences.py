"""Where `penstock.orbax` is not what Orbax 0.12.8 is, and why: the one table.

The signature tests fail for a name that differs and is not here. docs/reference/orbax-differences.md is
generated from it: `python -m tests.orbax_face.differences` writes the page, a test compares it.
Each part of the API has a section of its own here: name -> what differs, and why in as few words as do.
Names of one section that have the same text share a row of the page.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

from tests.orbax_face.absent_names import ABSENT
from tests.orbax_face.v1.differences import DIFFERENCES as V1
from tests.orbax_face.without_effect import WITHOUT_EFFECT

Section = dict[str, str]

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "orbax-differences.md"

_NONE_DEFAULT: Final = "`pytree_metadata_options` is None by default, which means the same."
_NOT_FINITE: Final = "A metric that is not finite is worse than every finite one; Orbax's sort cannot tell."
_SPECS_CALLED: Final = (
    "An override of `_get_json_tspec_write` or `_get_json_tspec_read` is called, as in earlier Orbax; "
    "0.12.8 has neither."
)
_ONE_PATH: Final = "Takes one `path`; anything else fails at the call, and in Orbax inside."

LEAVES: Final[Section] = {
    "type_handlers.SaveArgs": "`aggregate=True` is logged each time, in Orbax every twelve hours.",
    "type_handlers.ParamInfo": "Nothing is logged without `ts_context`: the leaves of a call share one.",
    "type_handlers.TypeHandler": (
        "Has `memory_size(values)` and `stage_worker()`, with defaults, for the one budget and the pipeline."
    ),
    "type_handlers.NumpyHandler": (
        f"Two leaves of one name are an error; Orbax keeps one of them. {_SPECS_CALLED}"
    ),
    "type_handlers.StringHandler": (
        "`a` beside `a/b` is an error of the save; Orbax fails later, or loses one."
    ),
    "type_handlers.ArrayHandler": (
        "A `dispatcher` is refused: every process saves its own shards; so are a `callback`, and an "
        "`array_metadata_store` of the caller's class. A `replica_id` that no shard has is a ValueError; "
        "Orbax writes nothing. Arrays are saved even if the `primary_host` is not there. Called directly, "
        f"it waits for no `byte_limiter`. {_SPECS_CALLED}"
    ),
    "type_handlers.SingleReplicaArrayHandler": (
        "Restores typed PRNG keys as keys, if an `array_metadata_store` knows them. In a job it sends only "
        "as part of a checkpointer's registry, which puts the sends of all leaves in order. A sharding "
        "without replicas is read as `ArrayHandler` reads it; Orbax raises an InvalidShardingError."
    ),
    "type_handlers.create_type_handler_registry": (
        "`add(override=True)` for a derived type puts it first; Orbax drops the base type's handler."
    ),
    "type_handlers.register_standard_handlers_with_options": (
        "`use_ocdbt` and `ts_context` may be left out; in Orbax that is a KeyError."
    ),
    "type_handlers.merge_ocdbt_per_process_files": (
        "Validates zarr version 3, too. `store_ocdbt_metadata_and_values_separately` is refused."
    ),
    "type_handlers.get_json_tspec_write": (
        "A `chunk_byte_size` below one element, or `shard_axes` beyond the rank, is a ValueError."
    ),
    "type_handlers.is_supported_type": _NONE_DEFAULT,
    "type_handlers.is_supported_empty_value": _NONE_DEFAULT,
    "utils.to_flat_dict": "Two leaves of one key (`{1: a, '1': b}`) are a ValueError; Orbax drops one.",
    "utils.from_flattened_with_keypath": (
        "A missing index, or keys of both kinds in a container, is a ValueError; Orbax asserts it."
    ),
    "transform_utils.Transform": "`original_key` may be a tuple, on which Orbax fails.",
    "utils.is_tmp_checkpoint": _ONE_PATH,
    "utils.is_checkpoint_finalized": _ONE_PATH,
    "utils.tmp_checkpoints": "Takes one `checkpoint_dir`, and returns names.",
}

HANDLERS: Final[Section] = {
    "handlers.PyTreeCheckpointHandler": (
        "Takes the names of 2024, too: `concurrent_gb`, `primary_host`. Registry and validator are None by "
        "default: the registry as it is at each call, and nobody. "
        "Limits in "
        "gigabytes bound all saves or restores together; what is larger is cut. With `use_compression` only "
        "what compresses well is compressed. With `support_rich_types` named tuples come back as dicts if no "
        "item is given. What is gone is a ValueError, and a FileNotFoundError where it is one in Orbax; no "
        "array reads as zeros. Called directly, it saves into a directory that is there. `transforms` "
        "without `restore_args` are a ValueError, in Orbax a KeyError."
    ),
    "BasePyTreeCheckpointHandler": "As `PyTreeCheckpointHandler`.",
    "args.PyTreeRestore": (
        "`on_missing='raise'`, which Orbax has not, makes a leaf that is not stored an error of a "
        "`partial_restore`. `PLACEHOLDER` is kept there, too, and a list may be shorter than the stored one. "
        "Where another container is stored it is a ValueError, in Orbax mostly a TypeError."
    ),
    "args.PyTreeSave": (
        "Arrays without elements are saved. Two leaves of one stored name are an error; Orbax keeps one."
    ),
    "handlers.StandardCheckpointHandler": "96, the default of both limits, means what the machine can spare.",
    "handlers.JaxRandomKeyCheckpointHandler": (
        "The implementation of a typed key is kept; Orbax fails for all but the default."
    ),
    "handlers.JsonCheckpointHandler": (
        "What JSON has not is a ValueError of the call, in Orbax a TypeError in the background. So are "
        "values, "
        "also of a `ProtoCheckpointHandler`, that differ between processes."
    ),
    "options.MultiprocessingOptions": (
        "A `primary_host` that is not in the job, or in a joint save not the first that takes part, is a "
        "ValueError of the call; Orbax waits ten minutes. `barrier_sync_key_prefix` names saves."
    ),
    "logging.StandardLogger": "An entry is an event of penstock's log, `orbax.step`.",
    "logging.AbstractLogger": "Is not told of the time between two saves.",
    "metadata.metadata_store": (
        "A write has ended, well or badly, when it returns. A store that writes can be pickled, too."
    ),
    "checkpointers.AbstractCheckpointer": "Is an abstract base class, without the old `structure`.",
    "checkpointers.Checkpointer": (
        "`force` replaces in one step, when the new checkpoint is complete; Orbax removes the old one first. "
        "A `temporary_path_class` that replaces steps of Orbax's classes is refused. Orbax's own steps "
        "`get_temporary_path`, `create_temporary_path` and "
        "`synchronize_next_awaitable_signal_operation_id` are "
        "not there. Reads what `v1.save` wrote from its own path, in Orbax a FileNotFoundError."
    ),
    "checkpointers.AsyncCheckpointer": (
        "The directory is there when `save` returns. A save that takes too long is cancelled; `close` waits "
        "until what it wrote is gone."
    ),
}

MANAGERS: Final[Section] = {
    "checkpoint_managers.CheckpointManager": (
        "`restore()` restores the latest step, and waits for a save first. `read_only` holds against "
        "`force`, "
        "too. Arrays that are the very objects of the step before are linked. A step that penstock reads on "
        "this machine is deleted afterwards; `delete` is an OSError meanwhile. After a failed save, the "
        "steps "
        "that it would have replaced are in `all_steps`. A step that is empty or cannot be "
        "described takes no place among the steps to "
        "keep. Metrics may be arrays of one number. "
        "A step that is no whole number from 0 is a ValueError. A `handler_registry` is copied. A folder "
        "`.penstock-writer` is there while a step is published or deleted; another writer is logged then, "
        "and nothing is deleted until it has ended. A root that is a checkpoint is logged, too. "
        "An override of a private method that Orbax calls and penstock does not is a UserWarning, of "
        "checkpointers and handlers, too."
    ),
    "checkpoint_managers.CheckpointManagerOptions": (
        "`todelete_full_path` (steps in a bucket are deleted, not moved) is refused. A "
        "`temporary_path_class` that replaces steps of Orbax's classes is refused, too. "
        "`cleanup_tmp_directories` leaves what "
        "another process is writing. A step moved to `todelete_subdir` replaces an earlier one there. With "
        "`best_fn`, a metric that is not finite is worse than every finite one."
    ),
    "checkpoint_utils.wait_for_new_checkpoint": (
        "A snapshot is of links, not of copies, and penstock does not delete the step meanwhile. Empty "
        "directories are passed over. So, too, `checkpoints_iterator`."
    ),
    "checkpoint_managers.BestN": _NOT_FINITE,
}

SECTIONS: Final[dict[str, Section]] = {
    "Leaves and their handlers": LEAVES,
    "Handlers of whole objects, and checkpointers": HANDLERS,
    "The manager of steps": MANAGERS,
}

SHORTLY: Final = {
    "overwrites, or is killed": (
        "What is there stays until the new checkpoint is complete. A save that fails leaves nothing behind."
    ),
    "catches errors": (
        "Each is a `penstock.PenstockError`, too, of the built-in type that Orbax raises or that is listed. "
        "Words are ours. A failure in the background is raised once, to whoever asks first."
    ),
    "restores a part, or has odd names": "What Orbax drops, skips or makes up in silence is an error.",
    "opens the files itself": (
        "One database, without `ocdbt.process_0`. What is small or compresses badly is not compressed. "
        "Orbax reads it. The folder `metadata` of a directory of steps has two files more, by which its "
        "damage shows: `_PENSTOCK_INTEGRITY` and `commit_success.txt`. Orbax and public programs look by "
        "name there."
    ),
    "sets limits of memory": "They are one budget. What is larger than a limit is cut into pieces.",
    "reads `jax.monitoring` or the log": (
        "penstock tells by [events](events.md) what it does, through the logger `penstock` of `logging`. "
        "What Orbax logs through absl is not there: public programs only silence it."
    ),
    "keeps its steps in a bucket": (
        "Trees, JSON and metrics go to `s3://`, `gs://` and `az://`, from one process or all of a job. "
        "Refused before anything is written: handlers of items or leaves that write files themselves, "
        "permissions, `todelete_full_path`, `active_processes` of v0 that are not all, `v1.partial`, and the "
        "deletion of one item. `todelete_subdir` has no effect, and waiting for a step makes no snapshot "
        "([more](../howto/save-to-a-bucket.md))."
    ),
    "sets an option of many processes": "Most need none: see [what has no effect](#without-effect).",
}
"""What a program does -> what its author should know."""

_MOST_NAMES: Final = 6


def differences() -> Section:
    """All of them but those of the newer API."""
    return {name: entry for section in SECTIONS.values() for name, entry in section.items()}


def _rows(texts: Section) -> list[str]:
    """A row for each text, with all the names that it is of."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, text in sorted(texts.items()):
        names[text].append(f"`{name}`")

    return [f"| {', '.join(found)} | {text} |" for text, found in names.items()]


def _some(names: tuple[str, ...]) -> str:
    shown = sorted(names) if len(names) <= _MOST_NAMES else sorted(names)[: _MOST_NAMES // 2]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(f"`{name}`" for name in shown) + more


def render() -> str:
    """The page of the documentation."""
    lines = [
        "# Where penstock.orbax is not what Orbax is",
        "",
        "Names, signatures, defaults and behaviour are those of Orbax 0.12.8, but for what is listed here.",
        "The page is generated from `tests/orbax_face/differences.py`, and tests fail for what is not in it.",
        "",
        *("| a program that | meets |", "| --- | --- |"),
        *(f"| {who} | {what} |" for who, what in SHORTLY.items()),
        "",
        "The rest is to look things up in.",
    ]
    for title, section in {**SECTIONS, "The newer API, `penstock.orbax.v1`": V1}.items():
        lines += ["", f"## {title}", "", "| name | difference |", "| --- | --- |", *_rows(section)]

    lines += ["", "## Without effect", "", "| parameter | because |", "| --- | --- |"]
    lines += _rows(
        {f"{name}.{one}": why for name, ones in WITHOUT_EFFECT.items() for one, why in ones.items()}
    )
    lines += ["", "## Names that are not there", "", "| module | names | because |", "| --- | --- | --- |"]
    lines += [f"| `{module}` | {_some(names)} | {why} |" for module, (names, why) in sorted(ABSENT.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
