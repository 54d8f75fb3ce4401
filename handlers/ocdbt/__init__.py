"""The OCDBT index: reading and writing its B+tree and manifest."""
