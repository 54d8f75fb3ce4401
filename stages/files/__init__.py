"""Reading and writing files for stages: a file per chunk, packs of small leaves, and closing."""
