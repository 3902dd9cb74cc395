"""A topology is read, refused with a sentence, written so that it reads back, and measured by real ranks."""

import json
import sys

import pytest
from typer.testing import CliRunner

from hotrow.cli import app, main
from hotrow.errors import DataError, RankError, SettingsError
from hotrow.plan.measure import host_memory
from hotrow.plan.topology import Link, Topology, load_topology, parse_rate, parse_time

CLUSTER = """
nodes = 2
ranks = 4
memory = "80GiB"
[between]
bandwidth = "100Gbit/s"
latency = "20us"
[within]
bandwidth = "450GB/s"
latency = 0.000008
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_a_cluster_file_is_read(cluster):
    topology = load_topology(cluster)
    assert (topology.nodes, topology.ranks, topology.size, topology.memory) == (2, 4, 8, 80 << 30)
    assert topology.between == Link(bandwidth=12.5e9, latency=20e-6)
    assert topology.within == Link(bandwidth=450e9, latency=8e-6)


def test_what_is_written_reads_back(tmp_path, cluster):
    topology = load_topology(cluster)
    topology.save(tmp_path / "copy.toml")
    assert load_topology(tmp_path / "copy.toml") == topology
    with pytest.raises(DataError, match="already there.*--overwrite"):
        topology.save(tmp_path / "copy.toml")
    (tmp_path / "letter").write_text("Dear all")
    with pytest.raises(SettingsError, match="not valid TOML"):
        topology.save(tmp_path / "letter", overwrite=True)
    assert (tmp_path / "letter").read_text() == "Dear all"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("nodes = 2", "nodes = 0"), "nodes: .*greater than or equal to 1"),
        (('"100Gbit/s"', '"fast"'), '"fast" is not a bandwidth. Write it as in 100Gbit/s'),
        (('"100Gbit/s"', "0"), "between.bandwidth: .*greater than 0"),
        (('"100Gbit/s"', "inf"), "between.bandwidth: .*finite"),
        (('"20us"', '"20"'), '"20" is not a time'),
        (('"80GiB"', '"lots"'), '"lots" is not a size'),
        (("[between]", "[betwen]"), 'there is no setting "betwen". Did you mean "between"'),
        (("ranks = 4", "ranks = 4\nrank = 1"), 'there is no setting "rank". Did you mean "ranks"'),
        (('memory = "80GiB"', ""), "memory: this setting is needed"),
        (("nodes = 2", "nodes = "), "is not valid TOML"),
    ],
)
def test_a_wrong_cluster_file_is_a_sentence(tmp_path, change, said):
    (tmp_path / "c.toml").write_text(CLUSTER.replace(*change))
    with pytest.raises(SettingsError, match=said):
        load_topology(tmp_path / "c.toml")


def test_a_missing_link_is_named():
    with pytest.raises(ValueError, match=r"2 nodes need a link.*\[between\]"):
        Topology(nodes=2, memory=1)
    with pytest.raises(ValueError, match=r"3 ranks a node need a link.*\[within\]"):
        Topology(nodes=1, ranks=3, memory=1)
    with pytest.raises(SettingsError, match="There is no cluster file"):
        load_topology("nowhere.toml")


def test_a_rail_is_read_and_written_as_any_link(tmp_path, cluster):
    without = load_topology(cluster)
    cluster.write_text(CLUSTER + '[rail]\nbandwidth = "80Gbit/s"\nlatency = "30us"\n')
    topology = load_topology(cluster)
    assert topology.rail == Link(bandwidth=10e9, latency=30e-6)
    assert topology.model_copy(update={"rail": None}) == without
    topology.save(tmp_path / "copy.toml")
    assert load_topology(tmp_path / "copy.toml") == topology
    assert "[rail]" not in without.to_toml()


@pytest.mark.parametrize(
    ("rail", "said"),
    [
        ('bandwidth = "fast"', '"fast" is not a bandwidth'),
        ("bandwidth = 0", "rail.bandwidth: .*greater than 0"),
        ('latency = "1ms"', "rail.bandwidth: this setting is needed"),
        ("bandwidth = 1.0\nspeed = 2", 'there is no setting "speed"'),
    ],
)
def test_a_wrong_rail_is_a_sentence(cluster, rail, said):
    cluster.write_text(f"{CLUSTER}[rail]\n{rail}\n")
    with pytest.raises(SettingsError, match=said):
        load_topology(cluster)


def test_a_rail_does_not_stand_for_the_link_between_nodes():
    with pytest.raises(ValueError, match=r"2 nodes need a link.*\[between\]"):
        Topology(nodes=2, memory=1, rail=Link(bandwidth=1))


def test_rates_and_times_are_read_as_written():
    assert parse_rate("8bit/s") == 1 and parse_rate("1.5 MiB/s") == 1.5 * 2**20 and parse_rate("25Gbps") == 3.125e9
    assert parse_time("2s") == 2 and parse_time("0.5ms") == 0.0005 and parse_time("3ns") == pytest.approx(3e-9)


def test_links_carry_at_once_and_an_exchange_takes_the_longer():
    topology = Topology(
        nodes=2, ranks=2, memory=1, between=Link(bandwidth=100, latency=1, overhead=0.5), within=Link(bandwidth=1000)
    )
    assert topology.seconds(within=1000, between=0) == 1
    assert topology.seconds(within=1000, between=200) == 1 + 3
    assert topology.seconds(within=9000, between=200) == 9
    assert topology.seconds(within=0, between=0) == 0


def test_the_kind_of_lane_says_which_links_carry():
    between, within, rail = Link(bandwidth=100), Link(bandwidth=1000), Link(bandwidth=50)
    topology = Topology(nodes=2, ranks=2, memory=1, between=between, within=within)
    assert topology.links("world") == (within, between)
    assert topology.links("node") == (within, None)
    assert topology.links("rail") == (None, between)
    with_rail = topology.model_copy(update={"rail": rail})
    assert with_rail.links("rail") == (None, rail)
    assert all(with_rail.links(kind) == topology.links(kind) for kind in ("world", "node"))
    assert with_rail.seconds(within=0, between=200) == 2
    assert with_rail.seconds(within=0, between=200, lane="rail") == 4
    assert Topology(nodes=1, ranks=2, memory=1, within=within, rail=rail).links("rail") == (None, None)


@pytest.mark.parametrize("node_size", [1, 4])
def test_where_the_world_is_one_rail_or_has_one_node_no_rail_is_measured(pool, node_size):
    found = pool.run(4, "plan_work:measured", node_size=node_size)[0]
    assert found["rail"] is None
    assert (found["between"] is None, found["within"] is None) == (node_size == 4, node_size == 1)


def test_real_ranks_measure_their_links(pool):
    found = pool.run(4, "plan_work:measured", node_size=2)
    assert all(topology == found[0] for topology in found)
    assert (found[0]["nodes"], found[0]["ranks"]) == (2, 2)
    assert found[0]["memory"] == host_memory() // 2
    for link in (found[0][name] for name in ("between", "within", "rail")):
        assert link["bandwidth"] > 0 and link["latency"] > 0 and 0 <= link["overhead"] < 0.25


def test_a_process_alone_says_its_memory(monkeypatch, capsys, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["hotrow", "topology", "--json", "--out", str(tmp_path / "here.toml")])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert (stopped.value.code or 0) == 0, err
    data = json.loads(out)
    assert data["memory"] == host_memory() and data["size"] == 1 and data["between"] is None
    assert load_topology(tmp_path / "here.toml").memory == data["memory"]


def test_a_rank_that_was_not_told_where_the_others_are_says_so(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    result = CliRunner().invoke(app, ["topology"])
    assert isinstance(result.exception, RankError)
    assert "Rank 0 of 2 could not join the others" in str(result.exception)
    assert "MASTER_ADDR" in str(result.exception)
