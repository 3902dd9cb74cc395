"""Real ranks for the tests of plans, started once."""

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def pool():
    with Ranks(4) as ranks:
        yield ranks
