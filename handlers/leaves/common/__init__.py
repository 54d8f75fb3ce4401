"""Shared by the leaf handlers: arrays cut into blocks, host buffers, targets compared with leaves."""
