"""Finds out what lies at a path, by file names and a few documents.

`find_item` is the entrance: from a path to the directory of one item. It asks `step_dirs` for the latest
finished step, `item_kinds` what each directory is, and `tombstone` what is about to be deleted.
`item_listing` names all items.
"""
