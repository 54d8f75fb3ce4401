"""What knows types, formats and stores: type handlers, the on-disk layout, OCDBT and the file systems."""
