"""The small log of the tests of training, and runs over it."""

from train.conftest import data, make_run, write_log  # noqa: F401
