"""Places to build, holds on directories, and paths: what penstock does with a store of any kind."""
