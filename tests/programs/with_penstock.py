"""A plugin of pytest: the tests of a program run with penstock in the place of Orbax."""

import penstock.orbax

penstock.orbax.install()
