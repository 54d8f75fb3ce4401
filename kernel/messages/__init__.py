"""The messages between stages: read this room and you know the whole system.

Save:     TreeToSave → flatten → LeafBatch → device_to_host → StagedBatch → write → WrittenBatch
          → commit → Committed → finalize → Published
Restore:  RestoreRequest → locate → Located → plan → PlannedBatch → limit_bytes → ReadBatch → read
          → HostBatch → host_to_device → RestoredBatch → assemble → RestoredTree

**Save.** `TreeToSave` holds the caller's tree until `flatten` takes it. `flatten` gives the leaves in
`LeafBatch`es of `Leaf`s, each with the value, its place in the tree and the spec of what will be stored.
What it decides for the stages after it is the `SavePlan`: every later batch refers to it, and a save
without a leaf to write sends one empty batch, so that the plan always arrives. `prioritise` changes the
order of leaves. `device_to_host` copies leaves to the host and gives `StagedBatch`es, with the leases on
their bytes: a large leaf becomes several `Extents`, small leaves share a buffer, and a leaf that its handler
writes into its own files is `Pending`. `StagedBatch.parts` and `StagedBatch.map` show all these bytes as
`Piece`s, so that a stage which changes leaves need not know how they travel. `encode`, which is there if
leaves have a codec, makes encoded pieces of plain ones. `limit_bytes` adds the leases on bytes that are
on their way to storage. `write` writes them, gives back the leases and gives `WrittenBatch`es, which say
where everything is, with its checksum. `commit` compares what was written with the plan, leaf by leaf,
and writes the documents: `Committed`. `finalize` publishes the checkpoint: `Published`.

**Restore.** `RestoreRequest` says which checkpoint is wanted, and as what. `locate` reads the documents of
the checkpoint: `Located`. `plan` compares it with the target and gives `PlannedBatch`es of `ReadLeaf`s, each
with the reads that fill its buffers. They travel in the columns of `ReadLeaves`, in which small leaves share
a read and a buffer. What it decided about the result as a whole is the `RestorePlan`, to which every later
batch refers. `prioritise` changes the order, `limit_bytes` cuts the reads into `ReadBatch`es under leases,
and `read` performs them: `HostBatch`es, whose bytes are all on the host; a stage after it sees them with
`HostBatch.parts`. `host_to_device` builds values of them, on devices or not: `RestoredBatch`es. `derive`,
which is there if functions make some leaves, puts what they make in the place of what they took. `assemble`
makes the tree: `RestoredTree`.

The unit is the batch: a hop between two stages costs more than a small leaf does, so small leaves travel
together and only a large one travels alone. Messages are frozen. A stage that drops a batch with leases
instead of passing it on releases it.

`save` and `restore` define the messages, and the columns in which leaves travel. `changed_specs` says what
becomes of a leaf that a stage changes, and `opaque` undoes at a restore what a stage made unreadable.
`RestoreOptions` are what a caller may ask of a restore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "ChangeKind",
    "ComputedLeaf",
    "LeafChange",
    "Leaves",
    "RestoreOptions",
)

if TYPE_CHECKING:
    from penstock.kernel.messages.changed_specs import LeafChange
    from penstock.kernel.messages.restore import ChangeKind, ComputedLeaf, RestoreOptions
    from penstock.kernel.messages.save import Leaves
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.kernel.messages.changed_specs": ("LeafChange",),
            "penstock.kernel.messages.save": ("Leaves",),
            "penstock.kernel.messages.restore": ("ChangeKind", "ComputedLeaf", "RestoreOptions"),
        },
    )
