"""Checkpoints of several items, and the kinds of items that users name.

`item_types` has what users write: `Composite(state=tree, config=Json({...}))`. `item_parts` takes it apart
into trees to be saved and documents at hand. `CompositeLayout` writes all trees as one, `SingleItemLayout`
the only one under its own key paths; both build on `items_layout_base`. `items_as_one_tree` opens several
items as one tree.
"""
