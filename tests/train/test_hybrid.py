"""Hybrid: rows miss k updates at most, of every worker; what they missed is measured; the model waits for no more."""

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import SettingsError
from hotrow.plan import Plan
from hotrow.policy import Exact, Hybrid, Sync
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.store.optimizers import SGD
from hotrow.train.checkpoint import Checkpoint
from hotrow.train.evaluate import evaluate_path
from hotrow.train.hybrid import HybridPipeline
from hotrow.train.logs import RunFolder
from hotrow.train.phases import Phases
from hotrow.train.trainer import train
from shapes import cases
from travel import Recorder, RemoteHost, batches, threads_of, travel


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_fetching_runs_ahead_of_updates_by_the_staleness_and_no_further(staleness):
    recorder = Recorder()
    recorder.may_update.clear()
    with HybridPipeline(batches(20), recorder, staleness=staleness, worst=True, ahead=20) as pipeline:
        for _ in range(staleness):  # the model goes on, although no update is made
            next(pipeline)
            pipeline.update()
        for _ in range(staleness + 1):
            assert recorder.fetched.acquire(timeout=30)
        for _ in range(20):
            assert recorder.grouped.acquire(timeout=30)
        assert recorder.events == [("fetch", i) for i in range(staleness + 1)]
        recorder.may_update.set()
        assert recorder.fetched.acquire(timeout=30)
        assert recorder.events[: staleness + 2] == [*recorder.events[: staleness + 1], ("update", 0)]


@pytest.mark.parametrize("staleness", [1, 2, 3, 4, 9])
def test_over_all_workers_a_fetched_row_misses_no_more_than_the_staleness(staleness):
    """Two workers whose updates wait until nothing else can happen: the worst order there is."""
    workers, steps = 2, 30
    applied = [0] * workers
    together = threading.Barrier(workers)  # the dense all-reduce
    broken = []

    class Worker(Recorder):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def fetch(self, lookup, step=None, only=None):
            missed = [lookup.number - done for done in applied]
            broken.extend(m for m in missed if m > staleness)
            return super().fetch(lookup, step, only)

        def finish(self):
            update = super().finish()
            update.apply = partial(self.applied, update.step)
            return update

        def applied(self, step):
            if step % 7 < 5:  # hold it back as long as there is another thing to do
                self.held.wait(0.002)
            applied[self.number] = step + 1

    def run(number):
        worker = Worker(number)
        worker.held = threading.Event()
        with HybridPipeline(batches(steps), worker, staleness=staleness, workers=workers) as pipeline:
            for _ in pipeline:
                together.wait(30)
                pipeline.update()

    threads_of([partial(run, number) for number in range(workers)])
    assert applied == [steps] * workers
    assert not broken


@settings(max_examples=20)
@given(cases(steps=8), st.integers(1, 4))
def test_every_update_is_applied_once_and_in_order(case, staleness):
    tier = RemoteHost(case.tables, 5)
    embeddings = Embeddings(
        case.tables, case.features, seed=5, tiers={"remote": tier}, plan=Plan.all_on("remote", case.tables)
    )
    travel(embeddings, case.batches, partial(HybridPipeline, staleness=staleness))
    assert [step for what, step, _ in tier.asked if what == "update"] == list(range(8))
    assert [step for what, step, _ in tier.asked if what == "fetch"] == list(range(8))
    done = 0
    for what, step, _ in tier.asked:
        assert what != "fetch" or step - done <= staleness
        done += what == "update"


def test_gradients_of_one_add_up_to_the_uses_of_each_row():
    tables = [Table(name="item", dim=2, optimizer=SGD(lr=1.0), init={"name": "fill", "value": 0.0})]
    embeddings = Embeddings(tables, [Feature(name="item")])
    rounds = [torch.randint(0, 9, (7,)) for _ in range(50)]
    source = (Batch.plain({"item": keys}) for keys in rounds)
    with HybridPipeline(source, embeddings, staleness=3) as pipeline:
        for fetched in pipeline:
            embeddings.embed(fetched.lookup).vectors().sum().backward()
            pipeline.update()
    uses = torch.bincount(torch.cat(rounds), minlength=9)
    assert torch.equal(embeddings.read("item", torch.arange(9)), -uses[:, None].float().expand(9, 2))


def test_what_rows_missed_is_measured():
    """Batches 0 to 3 all look row 7 up, and each a row of its own; no update is made before all are fetched."""
    embeddings = Embeddings([Table(name="item", dim=2)], [Feature(name="item")])
    source = (Batch.plain({"item": torch.tensor([7, 100 + i])}) for i in range(4))
    phases = Phases()
    with HybridPipeline(source, embeddings, staleness=3, worst=True, phases=phases) as pipeline:
        taken = [next(pipeline)]
        embeddings.embed(taken[0].lookup).vectors().sum().backward()
        while pipeline._begun < 4 or not pipeline._exhausted:
            pass
        said = pipeline.staleness()
    assert said["rows"] == [5, 1, 1, 1]
    assert said["batches"] == [1, 1, 1, 1]
    assert said["rows_most"] == 3
    assert said["rows_mean"] == pytest.approx(6 / 8)
    assert pipeline.staleness() == {}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [1, 3, 6])
def test_the_worst_case_misses_all_updates_it_may_and_is_the_same_every_time(staleness, workers):
    tables = [Table(name="item", dim=2, optimizer=SGD(lr=0.5))]
    rounds = [torch.randint(0, 9, (7,)) for _ in range(20)]
    ends = []
    for _ in range(2):
        embeddings = Embeddings(tables, [Feature(name="item")])
        source = [Batch.plain({"item": keys}) for keys in rounds]
        policy = partial(HybridPipeline, staleness=staleness, workers=workers, worst=True)
        with policy(iter(source), embeddings) as pipeline:
            for fetched in pipeline:
                embeddings.embed(fetched.lookup).vectors().square().sum().backward()
                pipeline.update()
            said = pipeline.staleness()
        assert said["batches"] == [*[1] * staleness, 20 - staleness]
        ends.append(embeddings.read("item", torch.arange(9)))
    assert torch.equal(*ends)


def test_the_bound_grows_to_its_full_size_over_the_first_steps():
    embeddings = Embeddings([Table(name="item", dim=2)], [Feature(name="item")])
    source = (Batch.plain({"item": torch.tensor([i])}) for i in range(20))
    with HybridPipeline(source, embeddings, staleness=4, ramp=8, worst=True) as pipeline:
        for fetched in pipeline:
            embeddings.embed(fetched.lookup).vectors().sum().backward()
            pipeline.update()
        said = pipeline.staleness()
    assert said["batches"] == [4, 2, 1, 1, 12]


def test_rows_are_not_fetched_earlier_than_the_model_needs():
    """A model that always finds its batch ready has one fetched ahead, whatever the bound."""
    recorder = Recorder()
    with HybridPipeline(batches(30), recorder, staleness=9) as pipeline:
        for step in range(30):
            with pipeline._changed:
                assert not step or pipeline._changed.wait_for(lambda step=step: pipeline._landed > step, 30)
            next(pipeline)
            assert pipeline._landed <= step + 2
            pipeline.update()


def test_a_staleness_of_nothing_is_sync_bit_for_bit(make_run, tmp_path, same_weights):
    plain = make_run(output__folder=str(tmp_path / "plain"))
    train(plain)
    hybrid = make_run(policy={"name": "hybrid", "staleness": 0})
    train(hybrid)
    same_weights(plain, hybrid)


@pytest.mark.parametrize("staleness", [4, 16])
def test_a_run_learns_as_much_and_says_how_stale_rows_were(make_run, tmp_path, staleness):
    plain = make_run(train__epochs=3, output__folder=str(tmp_path / "plain"))
    expected = train(plain).metrics["auc"]
    run = make_run(train__epochs=3, policy={"name": "hybrid", "staleness": staleness}, train__evaluate_every=30)
    result = train(run)
    assert result.metrics["auc"] == pytest.approx(expected, abs=0.02)
    stale = [line for line in RunFolder(run.output.folder).lines() if line["kind"] == "staleness"]
    assert stale
    assert max(line["batches_most"] for line in stale) <= staleness
    machine = [line for line in RunFolder(run.output.folder).lines() if line["kind"] == "machine"]
    assert {"seconds_wait", "seconds_update_behind", "seconds_fetch_ahead"} <= set().union(*machine)


def test_a_checkpoint_holds_every_update_of_finished_steps_and_none_of_others(make_run):
    """Evaluating what a checkpoint holds gives what evaluating in the middle of training gave."""
    run = make_run(
        policy={"name": "hybrid", "staleness": 8}, train__checkpoint_every=8, train__evaluate_every=8, train__keep=9
    )
    train(run)
    said = {line["step"]: line["auc"] for line in RunFolder(run.output.folder).lines() if line["kind"] == "evaluate"}
    for step, auc in said.items():
        path = run.output.folder / "checkpoints" / f"step-{step:08d}"
        if path.exists():
            assert Checkpoint(path).step == step
            assert evaluate_path(path)[2]["auc"] == auc


def test_policies_are_named_in_run_files(make_run):
    assert make_run(policy={"ahead": 2}).policy == Sync(ahead=2)
    assert make_run(policy={"name": "hybrid", "staleness": 4}).policy == Hybrid(staleness=4)
    assert make_run(policy={"name": "exact", "ahead": 3}).policy == Exact(ahead=3)
    run = make_run(policy={"name": "exact"})
    assert parse(Run, run.model_dump(mode="json")) == run
    with pytest.raises(SettingsError, match='there is no policy "hybird". Did you mean "hybrid"'):
        make_run(policy={"name": "hybird"})
    with pytest.raises(SettingsError, match=r"policy\..*stalenes"):
        make_run(policy={"name": "hybrid", "stalenes": 4})


@given(st.integers(1, 9), st.integers(0, 12), st.sampled_from([1, 2, 5]))
@settings(max_examples=40)
def test_the_worst_case_waits_for_no_batch_that_cannot_be_fetched_while_the_bound_grows(staleness, ramp, workers):
    recorder, steps = Recorder(), ramp + 2 * staleness + 4

    def run():
        options = {"staleness": staleness, "ramp": ramp, "workers": workers, "worst": True}
        with HybridPipeline(batches(steps), recorder, **options) as pipeline:
            for _ in pipeline:
                pipeline.update()

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(20)
    assert not running.is_alive(), "an update waits for a batch that waits for the update"
    assert recorder.steps == steps
