"""What travels between stages. Read it from top to bottom, and you know the whole flow.

A save, in `save`::

    TreeToSave        the caller's tree                                            flatten takes it
    LeafBatch[Leaf]   leaves with their values, and the `SavePlan`                 from flatten, prioritise
    StagedBatch       bytes on the host: `Piece`s of large leaves, `Pack`s of      from device_to_host,
                      small ones, what handlers write themselves (`Pending`)       encode, limit_bytes
    WrittenBatch      where the bytes lie in the files                             from write
    Committed         index and documents are durable, under a temporary name      from commit
    SaveReport        the checkpoint is visible                                    from finalize

A restore, in `restore` and `packs`::

    RestoreRequest       a path, a target and options                              locate takes it
    Located              an opened checkpoint; no array byte has been read         from locate
    LeafBatch[ReadLeaf]  what is read for each leaf, and the `RestorePlan`         from plan, prioritise
    ReadBatch            the same, with leave to read it                           from limit_bytes
    HostBatch            bytes on the host                                         from read
    RestoredBatch        finished values                                           from host_to_device, derive
    RestoredTree         the result                                                from assemble

Every batch refers to the plan of its save or restore, and carries the leases on its bytes.
`dataclasses.replace` keeps both. `changed_specs` says what stages declare that they do to leaves,
`opaque` how to undo it; `restore_options` and `statistics` are for callers.
"""
