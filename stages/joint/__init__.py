"""The parts of a save that differ if several processes save together."""
