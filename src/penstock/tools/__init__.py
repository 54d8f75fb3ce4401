"""Tools for whole checkpoints, behind the command line and `penstock.convert`."""
