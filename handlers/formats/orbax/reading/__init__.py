"""From the documents of a checkpoint to an opened one, which plans reads.

`open_checkpoint` is the entrance. `tree_structure` reads which leaves there are, `leaf_spec_decoding` what is
known of each, and `tree_documents` puts it all together, decoding nothing that `document_cache` knows.
`plain_items` and `json_leaves` open items that are no trees. The result is the `OrbaxCheckpoint` of
`stored_checkpoint`; `whole_chunks` and `storage_details` answer its questions about many leaves at once.
`item_survey` finds what of an item can be compared with a checksum, and `verification` compares it.
"""
