"""What was public before the house was rebuilt, and must stay: names, options, entry points and events.

Names of `penstock.orbax` are kept by tests/orbax_face, against Orbax itself.
"""

from __future__ import annotations

__all__ = ("ENTRY_POINT_GROUPS", "EVENTS", "NAMES", "OPTIONS")

NAMES = {
    "penstock": """
        CheckpointManager Checkpointer Composite Config HandlerRegistry MemoryRegulator PenstockError Pipeline
        RestoreReport SaveArgs SaveFormat SaveFuture SaveReport Transform __version__ convert
        export_safetensors metadata restore restore_items save seal steps sync verify watch
    """,
    "penstock.config": """
        Config FlowOptions JobLimits JobOptions LoopOptions MemoryOptions SaveArgs SaveFormat StoppingOptions
        StoreOptions TierOptions
    """,
    "penstock.failures": """
        ASSUMED PUBLISHED Failures Intervals JobTime TierCosts daly_interval in_steps plan_intervals simulate
    """,
    "penstock.items": "Array Composite Json NumpyRandomKey Proto PyTree RandomKey SaveRequest for_items",
    "penstock.memory": "MemoryKeywords config_and_regulator",
    "penstock.pipelines": """
        First configured_pipeline fitting_pipeline prioritised restore_pipeline save_pipeline
    """,
    "penstock.rules": """
        Cast Concat Constant Dequantize Drop Pad PlannedLeaf Rename Repeat Reshape Rule Rules Select Split
        RECIPES Stack Transpose Unstack load_recipe load_rules preview
    """,
    "penstock.steps": """
        Always AnyNames CheckpointManager EverySeconds EverySteps FirstSave KeepAll KeepAllOf KeepAnyOf
        KeepBest KeepEvery KeepEverySeconds KeepLast KeepPolicy KeepRecent KeepSteps NameFormat Never
        OnPreemption OnSteps SaveAllOf SaveAnyOf SaveMoment SavePolicy StepInfo StepMetadata StepNames
        Watch WhenIdle watch
    """,
    "penstock.sync": """
        CheckpointManager Checkpointer convert export_safetensors metadata restore restore_items save seal
        verify watch
    """,
    "penstock.telemetry": "Observer OpenTelemetrySpans PrometheusMetrics Promotion PromotionObserver",
    "penstock.testing": """
        Crash CrashStore FaultyStore HandlerConformance Hang Operation PowerLoss StageConformance
        StoreConformance
    """,
    "penstock.orbax": """
        AbstractCheckpointer ArrayCheckpointHandler ArrayRestoreArgs AsyncCheckpointHandler AsyncCheckpointer
        AsyncOptions BasePyTreeCheckpointHandler CheckpointHandler CheckpointHandlerRegistry CheckpointManager
        CheckpointManagerOptions Checkpointer CompositeCheckpointHandler CompositeOptions
        DefaultCheckpointHandlerRegistry Future JaxRandomKeyCheckpointHandler JsonCheckpointHandler
        NumpyRandomKeyCheckpointHandler PLACEHOLDER ProtoCheckpointHandler PyTreeCheckpointHandler
        PyTreeCheckpointer RestoreArgs RestoreTransform SaveArgs StandardCheckpointHandler
        StandardCheckpointer Transform apply_transformations args checkpoint_manager checkpoint_managers
        checkpoint_utils checkpointers future handlers merge_trees metadata options path step test_utils
        transform_utils tree type_handlers utils v1
    """,
    "penstock.orbax.v1": """
        AbstractCheckpointable AsyncResponse CheckpointMetadata Checkpointable CheckpointableHandler Context
        PLACEHOLDER PyTreeMetadata StatefulCheckpointable arrays checkpointables_metadata delete delete_async
        errors handlers is_orbax_checkpoint load load_async load_checkpointables load_checkpointables_async
        load_pytree load_pytree_async metadata multihost options partial path pytree_metadata save save_async
        save_checkpointables save_checkpointables_async save_pytree save_pytree_async serialization tree
    """,
    # New with the house, and promised by it.
    "penstock.errors": """
        AmbiguousHandlerError ChangedLeafError ChecksumError ClosedError ConfigError CorruptCheckpointError
        DeletedLeafError DestinationExistsError DuplicateNameError ForkedError HandlerError HandlerFailedError
        IncompleteCheckpointError IncompletePipelineError InvalidLeafError LeaseTooLargeError
        MissingFileError NoHandlerError NotACheckpointError OlderStepError PathError PenstockError
        PipelineError RunningLoopError SaveCancelledError SpecError StepExistsError StorageError
        StructureMismatchError TreeDifference TruncatedDataError UnsupportedFormatError
    """,
    "penstock.kernel": """
        Actor Committed Coordinator DataFile ReadLeaf ReadLeaves
        HandlerLookup Hold HostBatch KeyPath Layout Leaf LeafBatch LeafHandler LeafSpec MemoryRegulator
        Milestone ParamInfo Piece Pipeline PlannedBatch ReadBatch ReadableFile RestoreRequest RestoreRun
        RestoredBatch RestoredTree SaveRun Slot Stage StageStatistics StagedBatch Store StoredCheckpoint
        Threads TreeToSave TypeHandler Written WrittenBatch bottleneck run_pipeline
    """,
    "penstock.stages": """
        Assemble Commit DeviceToHost Encode Finalize Flatten HostToDevice LimitBytes Locate Plan Prioritise
        Read Write
    """,
    "penstock.handlers": """
        Array ArrayHandler Composite EmptyHandler Json LocalStore NumpyHandler NumpyRandomKey OrbaxLayout
        Proto PyTree RandomKey SafetensorsLayout ScalarHandler StringHandler default_handlers
    """,
}
"""Module -> its names."""

OPTIONS = """
    format.chunk_byte_size format.codec format.ocdbt format.ocdbt_target_data_file_size
    format.replica_parallel
    format.replica_parallel_max_replicas format.replica_parallel_min_bytes format.rich_types format.zarr
    loop.pause_collector loop.short_switches
    memory.limit_bytes memory.restore_concurrent_bytes memory.save_concurrent_bytes
    memory.save_device_host_concurrent_bytes
    processes.beat_s processes.call_s processes.join_s processes.silence_s processes.write_s
    restore.batch_bytes restore.batch_leaves restore.host_to_device.concurrency
    restore.limit_bytes.in_flight_bytes restore.piece_bytes restore.prioritise.first
    restore.read.concurrency restore.read.verify restore.stages
    save.batch_bytes save.batch_leaves save.limit_bytes.in_flight_bytes
    save.piece_bytes save.prioritise.first save.stages save.write.concurrency save.write.file_bytes
    stopping.at_exit stopping.at_exit_s stopping.delete_s stopping.read_s stopping.sigterm_s stopping.undo_s
    store.io
    tier.keep_every tier.keep_last tier.kind tier.limit_bytes tier.path tier.save_every
"""
"""Keys of the TOML file, those of stages among them."""

ENTRY_POINT_GROUPS = "penstock.handlers penstock.stages penstock.codecs penstock.stores"

EVENTS = """
    data.read data.written memory.limit_lowered memory.limit_raised memory.oversize
    memory.unreadable restore. restore.finished restore.overtaken save. save.callback_failed
    save.cancelled save.failed save.finalized save.left_behind save.may_not_fit save.not_linked save.started
    save.unchanged step.cleaned_up step.deleted step.deletion_hangs step.left_behind step.metric_missing
    step.not_deleted step.other_names step.retention_failed step.root_in_use
    step.root_is_checkpoint step.trash_ignored step.unreadable steps.no_signals
"""
"""Events; of `restore.renamed` and the like, and of `save.staged` and the like, how they begin."""
