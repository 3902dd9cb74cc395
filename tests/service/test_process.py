"""`hotrow shard` as a process: it says where it is, answers what is under way before it ends, and is killed."""

import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from typer.testing import CliRunner

from hotrow import Table
from hotrow.cli import app
from hotrow.cluster.status import _rows
from hotrow.errors import HotrowError, SettingsError
from hotrow.service.local import ShardProcess
from hotrow.service.metrics import Metrics, metrics_text
from hotrow.service.shard import Shard
from hotrow.store.optimizers import SGD
from hotrow.table import Fill
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Gradients, Part
from serving import served

DIM, KEYS = 16, 400
TABLES = [Table(name="t/1", dim=DIM, optimizer=SGD(lr=1.0), init=Fill(value=0.0))]
PART = [Part("t/1", 0, np.arange(KEYS), None, 0)]
ONES = np.ones(KEYS * DIM, np.float32)


def rows_of(tier: ServedTier) -> np.ndarray:
    rows = np.empty(KEYS * DIM, np.float32)
    tier.read(PART, rows, 0)
    return rows


def test_every_push_that_a_stopped_shard_received_is_answered(tmp_path):
    """What was acknowledged is in its folder, and nothing is there that was not acknowledged but the last ones."""
    process = ShardProcess(folder=tmp_path / "rows")
    tier = ServedTier([process.address], TABLES, timeout=20, retry=0.05)
    tier.fetch(PART, np.empty_like(ONES), 0)
    acknowledged, begun, stop = [], threading.Event(), threading.Event()

    def push() -> None:
        for step in range(100_000):
            if stop.is_set():
                return
            tier.update(PART, Gradients(ONES), step)
            acknowledged.append(step)
            if step == 20:
                begun.set()

    thread = threading.Thread(target=push)
    thread.start()
    assert begun.wait(60)
    assert process.stop() == 0
    again = ShardProcess(process.address, folder=tmp_path / "rows")
    stop.set()
    thread.join()
    assert (rows_of(tier) == -len(acknowledged)).all()
    tier.close()
    again.stop()


@pytest.mark.parametrize("combine", [False, True])
def test_killed_shards_lose_no_acknowledged_push_and_apply_none_twice(tmp_path, combine):
    from hotrow.world import World

    workers, steps, kills = 2, 150, 3
    process = ShardProcess(folder=tmp_path / "rows")
    worlds = [World(w, workers, workers) if combine else World() for w in range(workers)]
    tiers = [
        ServedTier([process.address], TABLES, timeout=60, retry=0.05, world=world, group="g" if combine else "")
        for world in worlds
    ]
    tiers[0].fetch(PART, np.empty_like(ONES), 0)
    marks = [threading.Event() for _ in range(kills)]
    failures: list[BaseException] = []

    def push(w: int) -> None:
        try:
            for step in range(steps):
                tiers[w].update(PART, Gradients(ONES), step)
                for k, mark in enumerate(marks):
                    if step == 20 + 30 * k:
                        mark.set()
        except BaseException as error:
            failures.append(error)
            for mark in marks:
                mark.set()

    threads = [threading.Thread(target=push, args=(w,)) for w in range(workers)]
    for thread in threads:
        thread.start()
    for mark in marks:
        assert mark.wait(60)
        process.kill()
        process = ShardProcess(process.address, folder=tmp_path / "rows")
    for thread in threads:
        thread.join()
    assert not failures
    assert (rows_of(tiers[0]) == -(steps if combine else steps * workers)).all()
    for tier in tiers:
        tier.close()
    process.stop()


def test_a_folder_of_another_shard_is_refused(tmp_path):
    with Shard("tcp://127.0.0.1:*", folder=tmp_path / "a") as shard, served([shard.address], TABLES):
        pass
    with (
        Shard("tcp://127.0.0.1:*", folder=tmp_path / "b") as other,
        Shard("tcp://127.0.0.1:*", folder=tmp_path / "a") as shard,
        pytest.raises(Exception, match="are those of shard 0 of 1, but this is shard 1 of 2"),
        served([other.address, shard.address], TABLES),
    ):
        pass


def test_a_folder_that_lacks_a_part_is_refused_with_what_to_do(tmp_path):
    folder, away = tmp_path / "rows", tmp_path / "away"

    def opened():
        with Shard("tcp://127.0.0.1:*", folder=folder) as shard, served([shard.address], TABLES) as tier:
            return rows_of(tier)

    with Shard("tcp://127.0.0.1:*", folder=folder) as shard, served([shard.address], TABLES) as tier:
        tier.fetch(PART, np.empty_like(ONES), 0)
        tier.update(PART, Gradients(ONES), 0)
    before = opened()
    for part in ("journal/journal", "shard.json", "table-t%2F1/head", "table-t%2F1"):
        (folder / part).rename(away)
        with pytest.raises(HotrowError, match=r"lacks .*(Put it back|restore a checkpoint)"):
            opened()
        if away.is_dir():
            shutil.rmtree(folder / part, ignore_errors=True)
        away.rename(folder / part)
    assert (opened() == before).all()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shard": "0", "shards": 1, "tables": []}', '{"shard": 0}', "\udcff"])
def test_a_damaged_shard_json_is_a_sentence(tmp_path, text):
    with Shard("tcp://127.0.0.1:*", folder=tmp_path) as shard, served([shard.address], TABLES):
        pass
    (tmp_path / "shard.json").write_text(text, errors="surrogateescape")
    with (
        Shard("tcp://127.0.0.1:*", folder=tmp_path) as shard,
        pytest.raises(HotrowError, match=r"shard.json is damaged.*restore a checkpoint"),
        served([shard.address], TABLES),
    ):
        pass


def test_metrics_and_health_are_served():
    with Shard("tcp://127.0.0.1:*") as shard, served([shard.address], TABLES) as tier:
        tier.fetch(PART, np.empty_like(ONES), 0)
        metrics = Metrics(shard, 0)

        def get(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=20) as answer:
                return answer.read().decode()

        text = get("/metrics")
        assert 'hotrow_shard_rows{table="t/1"} 400' in text
        assert 'hotrow_shard_requests_total{kind="fetch"} 1' in text
        assert "hotrow_shard_refused_total 0" in text
        for line in text.splitlines():
            assert line.startswith("# ") or (len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0)
        assert json.loads(get("/health")) == {
            "serving": True,
            "address": shard.address,
            "shard": 0,
            "shards": 1,
            "tables": ["t/1"],
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("/other")
        with pytest.raises(SettingsError, match="Metrics cannot be served at"):
            Metrics(shard, metrics.port)
        metrics.close()


def test_metrics_are_exact_and_names_are_escaped_as_prometheus_reads_them():
    name = 'größe "a\\b"\n\u2028'
    with Shard("tcp://127.0.0.1:*") as shard, served([shard.address], [Table(name=name, dim=1)]) as tier:
        tier.fetch([Part(name, 0, np.arange(1_234_567), None, 0)], np.empty(1_234_567, np.float32), 0)
        shard.counters.add("bytes_sent", 10**15)
        before, text, (store,) = shard.counters.of("bytes_sent"), metrics_text(shard), shard.holding.stores
        label = r'{table="größe \"a\\b\"\n' + '\u2028"}'
        assert f"hotrow_shard_rows{label} 1234567\n" in text
        assert f"hotrow_shard_bytes{label} {store.bytes}\n" in text
        sent = int(text.partition("\nhotrow_shard_bytes_sent_total ")[2].partition("\n")[0])
        assert before <= sent <= shard.counters.of("bytes_sent")  # an answer may still be on its way out
        metrics = Metrics(shard, 0)
        here = {"pid": os.getpid(), "address": shard.address, "metrics": metrics.port}
        assert _rows(here, True) == {"rows": 1_234_567, "bytes": store.bytes}
        metrics.close()


def test_the_commands_say_what_is_wrong_in_a_sentence(tmp_path):
    runner = CliRunner()
    for arguments, message in (
        (["shard", "--bind", "tcp://0.0.0.0:7700"], "so a key is needed"),
        (["shard", "--bind", "7700"], '"7700" is no address of a shard'),
        (["shard", "--bind", "tcp://[::1"], '"tcp://[::1" is no address of a shard'),
        (["shard", "--bind", "tcp://127.0.0.1:99999"], '"tcp://127.0.0.1:99999" is no address of a shard'),
        (["shard", "--bind", "tcp://127.0.0.1"], '"tcp://127.0.0.1" is no address of a shard'),
        (["shard", "--key", str(tmp_path / "none")], "There is no key file"),
        (["shard", "--bind", "tcp://127.0.0.1:*", "--metrics", "x"], '--metrics "x": give a port'),
    ):
        result = runner.invoke(app, arguments)
        assert message in str(result.exception)
    with Shard("tcp://127.0.0.1:*") as shard:
        assert "cannot listen at" in str(runner.invoke(app, ["shard", "--bind", shard.address]).exception)


def test_keys_are_made_and_a_shard_uses_them(tmp_path):
    made = CliRunner().invoke(app, ["keys", str(tmp_path / "keys"), "--json"])
    files = json.loads(made.stdout)
    with ShardProcess("tcp://127.0.0.1:*", key=files["shard"], metrics=0) as process:
        with served([process.address], TABLES, key=files["trainer"]) as tier:
            tier.fetch(PART, np.empty_like(ONES), 0)
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(30) == 0
