import pytest

from hotrow.errors import SettingsError
from hotrow.world import World


def test_a_process_alone_is_a_world_of_one() -> None:
    assert World.here({}) == World(0, 1, 1)


def test_ranks_of_a_node_stand_side_by_side() -> None:
    world = World.here({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"})
    assert (world.node, world.node_rank, world.nodes) == (2, 1, 3)


def test_each_rank_is_in_one_lane_of_every_kind() -> None:
    world = World(5, 6, 2)
    assert world.lanes("world") == [[0, 1, 2, 3, 4, 5]]
    assert world.lanes("node") == [[0, 1], [2, 3], [4, 5]]
    assert world.lanes("rail") == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "x"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError):
        World.here(environment)
