"""Layouts: a checkpoint as a whole, of any format, of one tree or of several named items.

* `discovery`: what is at a path.
* `auto_layout`: writes with one layout and opens what any of them recognises.
* `items`: a checkpoint of several named items, each a tree, an array or one of Orbax's documents.
"""
