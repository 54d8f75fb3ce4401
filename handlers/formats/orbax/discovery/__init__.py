"""What lies at a path, told by names of files and by the few documents that say so.

`find_item` is the entrance: from a path to the directory of one item. It asks `step_dirs` for the latest
finished step, `item_kinds` what each directory is, and `tombstone` what is about to be deleted.
`item_listing` names all items.
"""
