"""Several ranks give what one process with plain tables gives, whatever the plan and the shape of the cluster.

A step of W ranks, each with a batch and its loss, is one step of one process with the mean of the W losses.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import RankError, SettingsError
from hotrow.plain import PlainEmbeddings
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adagrad, Adam, Momentum
from hotrow.tiers.sharded import ShardedTier
from hotrow.world import World
from rank_work import SEED, Job, Seen
from ranks import RankFailed, Ranks
from shapes import ON_DEVICE, PHASES, Case, cases
from test_embeddings import initial, loss_of, results

SHAPES = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (4, 4)]
CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # sums in another order, which Adagrad with a rate of 1 makes larger
NAMES = ("replicated", "node", "world")
HOT = st.lists(st.one_of(st.integers(-5, 20), st.sampled_from([2**32, 2**62, -(2**63)])), max_size=12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool


@st.composite
def plans(draw: st.DrawFn, tables: Sequence[Table]) -> Plan:
    """Any keys on any tiers, in any order; the last one takes the others."""
    shares = {}
    for table in tables:
        order = draw(st.permutations(NAMES))[: draw(st.integers(1, 3))]
        named = [Share(name, np.array(draw(HOT), np.int64)) for name in order[:-1]]
        shares[table.name] = (*named, Share(order[-1]))
    return Plan(shares)


def job_of(case: Case, plan: list[Plan], dedup: str = "node") -> Job:
    keys = torch.unique(torch.cat([g.values for b in case.batches for g in b.groups] + [torch.tensor([2**40 + 17])]))
    return Job(case.tables, case.features, plan, dedup, keys=keys)


def dealt(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Each rank's batches: at every step each has one of its own."""
    return [list(batches[rank::size]) for rank in range(size)]


def plain_of(case: Case) -> PlainEmbeddings:
    return PlainEmbeddings(case.tables, case.features, initial=initial, seed=SEED)


def assert_equal_to_plain(case: Case, job: Job, each: list[list[Batch]], seen: list[Seen]) -> None:
    plain = plain_of(case)
    for step in range(len(each[0])):
        embedded = [plain(batches[step]) for batches in each]
        for rank, theirs in enumerate(embedded):
            torch.testing.assert_close(seen[rank].results[step], results(theirs), **CLOSE)
        (sum(map(loss_of, embedded)) / len(each)).backward()
        plain.step()
    assert_same_rows(job, seen, plain)


def assert_same_rows(job: Job, seen: list[Seen], plain: PlainEmbeddings) -> None:
    for table in job.tables:
        for rank in seen:
            torch.testing.assert_close(rank.rows[table.name], plain.read(table.name, job.keys), **CLOSE)
            torch.testing.assert_close(rank.rows[table.name], seen[0].rows[table.name], rtol=0, atol=0)


def assert_given_once(case: Case, seen: list[Seen]) -> None:
    for table in case.tables:
        owners = [key for rank in seen for key in rank.given[table.name]]
        assert len(owners) == len(set(owners)), "two ranks give the same row"


@pytest.mark.parametrize(("size", "node_size"), SHAPES)
@settings(max_examples=10, phases=PHASES)
@given(data=st.data())
def test_any_plan_on_any_ranks_equals_one_process_with_plain_tables(ranks, size, node_size, data):
    case = data.draw(cases(steps=2 * size))
    job = job_of(case, [data.draw(plans(case.tables))], data.draw(st.sampled_from(["node", "rank", "none"])))
    job.device = data.draw(st.booleans())
    each = dealt(case.batches, size)
    seen = ranks.run(size, "rank_work:train", job, each=each, node_size=node_size)
    assert_equal_to_plain(case, job, each, seen)


@pytest.mark.parametrize(("size", "node_size"), [(2, 2), (4, 2), (3, 1)])
@settings(max_examples=10, phases=PHASES)
@given(data=st.data())
def test_a_plan_that_changes_between_steps_loses_no_update(ranks, size, node_size, data):
    case = data.draw(cases(steps=3 * size))
    job = job_of(case, [data.draw(plans(case.tables)) for _ in range(3)])
    each = dealt(case.batches, size)
    seen = ranks.run(size, "rank_work:train", job, each=each, node_size=node_size)
    assert_equal_to_plain(case, job, each, seen)
    assert_given_once(case, seen)


@pytest.mark.parametrize(("size", "node_size"), [(4, 2), (3, 3)])
@settings(max_examples=6, phases=PHASES)
@given(data=st.data())
def test_every_plan_gives_the_same_bits_and_every_copy_too(ranks, size, node_size, data):
    case = data.draw(cases(steps=2 * size))
    each = dealt(case.batches, size)
    whole = [Plan.all_on(name, case.tables) for name in NAMES]
    runs = [(plan, "node") for plan in (*whole, data.draw(plans(case.tables)))] + [(whole[2], "rank")]
    first = None
    for plan, dedup in runs:
        seen = ranks.run(size, "rank_work:train", job_of(case, [plan], dedup), each=each, node_size=node_size)
        rows = {t.name: {k: row for rank in seen for k, row in rank.given[t.name].items()} for t in case.tables}
        first = first or rows
        assert rows == first  # values, state, clock, uses and last step
        for name in (f"replicated/{t.name}" for t in case.tables):
            assert all(rank.held[name] == seen[0].held[name] for rank in seen)
        for name in (f"node/{t.name}" for t in case.tables):
            for rank in range(node_size, size):
                assert seen[rank].held[name] == seen[rank % node_size].held[name]


@st.composite
def named_plans(draw: st.DrawFn, tables: Sequence[Table]) -> Plan:
    """Any keys replicated or on the node, those that no tier names on the world's."""
    shares = {}
    for table in tables:
        named = [Share(name, np.array(draw(HOT), np.int64)) for name in draw(st.permutations(NAMES[:2]))]
        shares[table.name] = (*named[: draw(st.integers(0, 2))], Share("world"))
    return Plan(shares)


@pytest.mark.parametrize(("size", "node_size"), [(1, 1), (2, 2), (4, 2), (3, 1)])
@settings(max_examples=8, phases=PHASES)
@given(data=st.data())
def test_rows_on_a_device_are_as_those_in_host_memory_through_changes_of_plan(ranks, size, node_size, data):
    case = data.draw(cases(steps=3 * size, optimizers=ON_DEVICE))
    job = job_of(case, [data.draw(named_plans(case.tables)) for _ in range(3)])
    job.device, job.device_rows = data.draw(st.booleans()), ("replicated", "node")
    each = dealt(case.batches, size)
    seen = ranks.run(size, "rank_work:train", job, each=each, node_size=node_size)
    assert_equal_to_plain(case, job, each, seen)
    assert_given_once(case, seen)
    for table in case.tables:
        copies = [rank.held[f"replicated/{table.name}"] for rank in seen]
        assert all(copy == copies[0] for copy in copies)


def test_a_row_on_a_device_moves_though_the_new_plan_names_it_there_too(ranks):
    case = small_case(8, optimizer=SGD(lr=0.1))
    first = (Share("replicated", np.array([0, 1])), Share("world"))
    job = job_of(case, [Plan({"a": a, "b": first}) for a in (first, (Share("node", np.array([0])), *first))])
    job.device_rows = ("replicated", "node")
    each = dealt(case.batches, 4)
    assert_equal_to_plain(case, job, each, ranks.run(4, "rank_work:train", job, each=each, node_size=2))


def test_the_tiers_that_a_plan_asks_for_have_their_rows_on_the_device_where_it_names_all_of_them(ranks):
    case = small_case(8, optimizer=SGD(lr=0.1))
    whole = Plan({"a": PLAN.shares["a"], "b": (Share("replicated", np.array([0])), Share("node"))})
    job = job_of(case, [PLAN, whole, PLAN])
    seen = ranks.run(4, "rank_work:train_on_device", job, each=dealt(case.batches, 4), node_size=2)
    assert all(rank == seen[0] for rank in seen)
    assert seen[0] == {"replicated": True, "node": True, "world": False, "said": seen[0]["said"]}
    assert 'table b on tier "node", whose rows are on a device' in seen[0]["said"]


@settings(max_examples=8, phases=PHASES)
@given(data=st.data())
def test_several_lookups_before_a_step_make_one_update_of_all_ranks(ranks, data):
    case = data.draw(cases(steps=4))
    job = job_of(case, [data.draw(plans(case.tables))])
    each = dealt(case.batches, 2)
    seen = ranks.run(2, "rank_work:train_summed", job, each=each)
    plain = plain_of(case)
    (sum(loss_of(plain(batch)) for batch in case.batches) / 2).backward()
    plain.step()
    assert_same_rows(job, seen, plain)


def small_case(steps: int, **table: object) -> Case:
    """Two tables, a pooled feature and a sequence, keys that ranks share and keys that they do not."""
    tables = [Table(name="a", dim=8, **table), Table(name="b", dim=3, optimizer=Adam(lr=0.1))]
    features = [Feature(name="a"), Feature(name="b", pooling="sequence")]
    batches = []
    for step in range(steps):
        keys = torch.arange(6) * 7 % 5 + step % 3
        batches.append(Batch.plain({"a": keys, "b": keys * 1000003 + step}))
    return Case(tables, features, batches)


PLAN = Plan(
    {
        "a": (Share("replicated", np.array([0, 1, 99])), Share("node", np.array([2, 3])), Share("world")),
        "b": (Share("node", np.array([0, 1000003])), Share("world")),
    }
)


@pytest.mark.parametrize(("wire", "off"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_a_narrow_wire_rounds_rows_and_gradients_and_copies_still_agree(ranks, wire, off):
    case = small_case(8, optimizer=SGD(lr=0.1))
    each = dealt(case.batches, 4)
    exact, rounded = (job_of(case, [PLAN]) for _ in range(2))
    rounded.wire = wire
    one, other = (ranks.run(4, "rank_work:train", job, each=each, node_size=2) for job in (exact, rounded))
    torch.testing.assert_close(other[0].rows["a"], one[0].rows["a"], rtol=off, atol=off)
    assert not torch.equal(other[0].rows["a"], one[0].rows["a"])
    assert all(rank.held["replicated/a"] == other[0].held["replicated/a"] for rank in other)


def test_a_thread_may_fetch_ahead_while_another_one_updates(ranks):
    case = small_case(40, optimizer=SGD(lr=0.1))
    tables = [case.tables[0], case.tables[1].model_copy(update={"optimizer": SGD(lr=0.1)})]
    case = Case(tables, case.features, case.batches)  # gradients that do not depend on rows: stale ones do no harm
    each = dealt(case.batches, 4)
    job = job_of(case, [PLAN])
    seen = ranks.run(4, "rank_work:train_ahead", job, each=each, node_size=2)
    plain = plain_of(case)
    for step in range(len(each[0])):
        (sum(loss_of(plain(batches[step])) for batches in each) / 4).backward()
        plain.step()
    assert_same_rows(job, seen, plain)


@pytest.mark.parametrize("device_rows", [(), ("replicated", "node")])
def test_a_snapshot_of_any_ranks_restores_on_any_other_number(ranks, tmp_path, device_rows):
    case = small_case(24, optimizer=Adagrad(lr=0.1) if device_rows else Momentum(lr=0.1))
    last = Share("world" if device_rows else "node")
    other_plan = Plan({"a": (Share("world"),), "b": (Share("replicated", np.array([2])), last)})
    base, seen, at = None, [], 0
    plain = plain_of(case)
    for n, (size, node_size, plan) in enumerate([(1, 1, PLAN), (3, 1, other_plan), (4, 2, PLAN), (2, 2, other_plan)]):
        folder = str(tmp_path / f"rows{n}")
        batches = case.batches[at : at + 2 * size]
        at += 2 * size
        each = dealt(batches, size)
        job = job_of(case, [plan])
        job.device_rows = device_rows if n % 2 == 0 else ()  # from a device to host memory and back
        seen = ranks.run(size, "rank_work:train_and_save", job, folder, base, each=each, node_size=node_size)
        for step in range(2):
            (sum(loss_of(plain(mine[step])) for mine in each) / size).backward()
            plain.step()
        assert_same_rows(job, seen, plain)
        base = folder
    assert not list(tmp_path.glob(".*")), "nothing half-written stays behind"


def test_ranks_with_different_plans_are_told_so(ranks):
    case = small_case(2)
    plans = [PLAN, Plan.all_on("world", case.tables)]
    each = [(job_of(case, [plan]), batches) for plan, batches in zip(plans, dealt(case.batches, 2), strict=True)]
    with pytest.raises(RankFailed, match="Rank 1 has another plan"):
        ranks.run(2, "rank_work:train_own", each=each)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("miss_a_step", r"wants to fetch at step 0, while rank 1 wants to fetch at step 1"),
        ("stay_away", r"though every rank is there"),
        ("host_rows", r'rows of table a on tier "host", where each of the 2 ranks would train rows of its own'),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told_what_is_wrong(ranks, work, said):
    case = small_case(2)
    plan = Plan.all_on("world", case.tables)
    answers = ranks.answers(2, f"rank_work:{work}", job_of(case, [plan]), each=dealt(case.batches, 2))
    kind, sentence, _ = answers[0]
    assert kind in ("RankError", "SettingsError")
    assert re.search(said, sentence)


def test_a_rank_that_cannot_write_its_piece_fails_the_snapshot_of_all(ranks, tmp_path):
    case = small_case(3)
    told = ranks.run(3, "rank_work:fail_to_write", job_of(case, [PLAN]), str(tmp_path), each=dealt(case.batches, 3))
    assert len(set(told)) == 1
    assert "rank 1 could not write its piece: No space left on device" in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_a_rank_that_dies_makes_the_others_stop_with_a_sentence_that_names_it(ranks):
    case = small_case(12)
    (_, victim, _) = ranks.run(3, "rank_work:process")
    answers = ranks.answers(3, "rank_work:die_in_mid_run", job_of(case, [PLAN]), 1, each=dealt(case.batches, 3))
    assert answers[1][0] == "gone"
    for rank in (0, 2):
        kind, sentence, _ = answers[rank]
        assert kind == "RankError"
        assert re.match(rf"Rank 1 \(.*, process {victim}\) is gone, so rank {rank} stops too\.", sentence)


def test_a_tier_refuses_settings_that_there_are_not():
    table = [Table(name="a", dim=2)]
    for settings_, said in [
        ({"scope": "nodes"}, 'no scope "nodes". Did you mean "node"'),
        ({"dedup": "key"}, 'no dedup "key"'),
        ({"wire": "float64"}, 'no wire format "float64"'),
        ({"timeout": 0}, "A timeout of 0 seconds"),
        ({"scope": "node", "dedup": "none"}, "deduplicated"),
    ]:
        with pytest.raises(SettingsError, match=said):
            ShardedTier(table, World(), **settings_)


def test_ranks_without_torch_distributed_are_told_how_to_start():
    with pytest.raises(RankError, match="torchrun or hotrow up"):
        Embeddings([Table(name="a", dim=2)], [Feature(name="a")], world=World(0, 2, 2))


def test_tiers_travel_as_the_plan_says_and_rows_stay_when_it_says_otherwise(ranks):
    case = small_case(24)
    each = dealt(case.batches, 4)
    ways = [{"dedup": "rank"}, {"dedup": "node", "wire": "float32"}, {"dedup": "none"}, {}]
    plans = [Plan(PLAN.shares, facts=facts) for facts in ways]
    seen = ranks.run(4, "rank_work:train_planned", job_of(case, plans), each=each, node_size=2)
    assert all(rank.ways == [("rank", "float32"), ("node", "float32"), ("none", "float32")] + [("none", "float32")] * 3
               for rank in seen)  # fmt: skip
    one = ranks.run(4, "rank_work:train", job_of(case, [PLAN]), each=each, node_size=2)
    for mine, plain in zip(seen, one, strict=True):
        assert all(torch.equal(mine.rows[name], plain.rows[name]) for name in plain.rows)
    narrow = [Plan(PLAN.shares, facts={"wire": "bfloat16"})]
    rounded = ranks.run(4, "rank_work:train_planned", job_of(case, narrow), each=each, node_size=2)
    assert rounded[0].ways[0] == ("node", "bfloat16")
    assert not torch.equal(rounded[0].rows["a"], seen[0].rows["a"])


def test_ranks_whose_plans_travel_differently_are_told_so(ranks):
    case = small_case(2)
    plans = [Plan(PLAN.shares, facts={"dedup": dedup}) for dedup in ("rank", "node")]
    each = [(job_of(case, [plan]), batches) for plan, batches in zip(plans, dealt(case.batches, 2), strict=True)]
    with pytest.raises(RankFailed, match="Rank 1 has another plan"):
        ranks.run(2, "rank_work:train_own", each=each)
