"""A plugin of pytest: the tests of a program run with Orbax."""
