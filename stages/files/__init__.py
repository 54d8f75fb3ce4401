"""Files that stages write and read besides data: documents, files of handlers, and the room for them."""
