"""Verifies that all below a path is still what was written: every checkpoint, every item, every file.

`checkpoints_below` finds the checkpoints, `checkpoint_survey` says what of one can be compared and what
cannot, `verify` reads and compares, and `verify_report` is the result.
"""
