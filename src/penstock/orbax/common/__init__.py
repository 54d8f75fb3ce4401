"""What both of Orbax's APIs need: leaf arguments, documents, directories, metadata of leaves."""
