"""The tests of the template ``examples/own_op``."""

from examples.own_op.tests.test_own_op import *  # noqa: F403
