"""A plugin of pytest: the tests of a program run with Orbax."""

from absl import flags

flags.FLAGS.mark_as_parsed()  # tests that are written for absl read flags, and pytest parses none
