"""Type handlers, one file per kind of leaf."""
