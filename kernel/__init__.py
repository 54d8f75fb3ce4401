"""Mechanism only: streams, the memory regulator, pipelines and futures; knows no array type and no format."""
