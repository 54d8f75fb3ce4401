"""A plugin of pytest: the tests of a program run with penstock in the place of Orbax."""

from absl import flags

import penstock.orbax

penstock.orbax.install()
flags.FLAGS.mark_as_parsed()  # as in `with_orbax`
