"""What the source systems published and what peers do, each beside the figure that answers it here.

The tables are made of any reports, quick or full ones: a claim without a figure says why, and one that was not reached
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotrow.bench.report import figure


class Claim(NamedTuple):
    """One published result. `id` is the figure here; `differs` is what to know before the two are compared."""

    system: str
    published: str
    workload: str
    id: str
    differs: str


CLAIMS = (
    Claim(
        "RecD",
        "3.71 times smaller in storage",
        "Meta's production logs",
        "dedup.storage",
        "a made-up session log (16 samples a session); real logs are among the figures of `dedup`",
    ),
    Claim(
        "RecD",
        "1.79 times the samples a second preprocessed",
        "Meta's production readers",
        "dedup.read",
        "read and preprocessed, one process, the same log",
    ),
    Claim(
        "RecD",
        "2.49 times the samples a second trained",
        "production models on 48 GPUs or more",
        "dedup.train",
        "a sequence transformer on CPU cores",
    ),
    Claim(
        "FAE",
        "2.3 times XDL on CPUs",
        "DLRM on Criteo and others, 256 to 512 MB of hot rows",
        "hot.vs_cpu",
        "the same model in PyTorch with Hotrow's row store on all cores, not XDL",
    ),
    Claim(
        "FAE",
        "1.52 times XDL on CPU and GPU",
        "the same",
        "hot.vs_cpu_gpu",
        "tables on the CPU and the dense part on the GPU as a CUDA graph, not XDL",
    ),
    Claim("FAE", "baseline accuracy", "the same", "hot.auc_gap", "Criteo's sample and the demo's log, both modes"),
    Claim(
        "HET",
        "up to 88% less embedding traffic",
        "8 workers, 1 server, dim 128, a cache of 10%",
        "cache.bytes_saved",
        "4 workers, 1 shard; bytes of the link itself; the lowest of four models",
    ),
    Claim(
        "HET",
        "up to 20.68 times TensorFlow and Parallax on 1 GbE",
        "time to an AUC",
        "cache.exchange_1g",
        "time of the embedding exchange against Hotrow without a cache, which sends unique keys only; "
        "neither peer was run. 88% fewer bytes would be 8.3 times",
    ),
    Claim(
        "HET",
        "at most 2.3 times its own run without a cache on 10 GbE",
        "Wide&Deep on Criteo",
        "cache.exchange_10g.wide_deep",
        "time of the embedding exchange, not of the whole step",
    ),
    Claim(
        "HET",
        "AUC 79.62 at s = 100, 79.64 at s = 0",
        "Wide&Deep on Criteo",
        "cache.auc_gap",
        "three models on Criteo's sample, three seeds, the largest mean difference; recorded before the benchmark ran "
        "the Trainer",
    ),
    Claim(
        "Persia",
        "2.6 times fully synchronous training",
        "100 trillion parameters on a cloud's cluster",
        "hybrid.vs_sync",
        "2 trainers and 2 shards on two cores, a link as slow in proportion",
    ),
    Claim(
        "Persia",
        "samples a second flat from 6.25 to 100 trillion parameters",
        "the same",
        "hybrid.flat",
        "the key space is nominal: resident rows are bounded, others are evicted",
    ),
    Claim(
        "Persia",
        "AUC within 0.1% of synchronous",
        "Taobao, Avazu, Criteo",
        "hybrid.auc_gap",
        "Criteo's sample and the demo's log; the largest difference over k = 4, 16, 64",
    ),
    Claim(
        "Persia",
        "7.12 times XDL, 1.71 times Paddle",
        "Taobao",
        "hybrid.vs_persia",
        "neither peer was run; Persia's own package stands for them",
    ),
    Claim(
        "Persia",
        "servers come back after a process dies",
        "described, without a figure",
        "hybrid.recovery_s",
        "seconds from `kill -9` of a shard to the next finished step; updates lost and applied twice are counted",
    ),
    Claim(
        "FlexShard",
        "over 85% less all-to-all traffic",
        "production sequence models on GPU clusters",
        "shard.bytes_saved",
        "2 nodes of 2 ranks on Gloo; the figure against deduplicated row-wise is shard.bytes_saved_dedup",
    ),
    Claim(
        "FlexShard",
        "almost 6 times lower communication latency",
        "the same",
        "shard.comm",
        "the same; the link between nodes has a tenth of the rate within",
    ),
)

PRODUCT, PART = "product", "part"
CACHE_RUNS = ("cache.bytes_saved", "cache.exchange", "cache.violations", "cache.auc", "cache.by_size")
HYBRID_RUNS = ("hybrid.vs_sync", "hybrid.exact_vs_sync", "hybrid.flat")
PRODUCT_FIGURES = ("train.", "dedup.storage", "dedup.train", "hot.auc", "hybrid.auc", *CACHE_RUNS, *HYBRID_RUNS)
"""Figures of what users run: `prepare`, or `train` with a run file. All others are of a part."""

PARTS = {
    "cache": "Workers are ranks of a run of the Trainer, with rows on a shard that is filled before as a long run "
    "leaves it (product). Pulls and pushes of a shard alone are a part.",
    "cache_auc": "Runs of the Trainer on four ranks, each with a cache before a shard (product). What is here was "
    "recorded before that: a crew in one process with a training loop of its own, where at s = 0 each worker's update "
    "came after another's. In a run they are combined into one, and s = 100 is further from that: docs/cache.md.",
    "dedup": "Storage is what `prepare` writes and training is `hotrow train` on a CPU (product). Reading is `Reader` "
    "alone, and the largest batch that of one step. `hotrow train` on a GPU gains nothing from deduplication yet.",
    "hot": "A training loop of its own around `GraphStep`, with batches in memory. `hotrow train` does not use that "
    "step yet: on this card and at this batch size it does 0.36 million samples a second, less than a plain loop "
    "around FBGEMM does.",
    "hot_auc": "`hotrow train` itself (product).",
    "hybrid": "Differences of AUC are of `hotrow train`, rates of its Trainer in two processes with rows on shards "
    "(product). Recovery is of workers that only fetch and push; beside Persia's package both sides have loops of "
    "their own, with batches in memory.",
    "kernels": "Kernels alone, with keys already numbered and on the device.",
    "shard": "Exchanges and steps in a loop of their own, with batches in memory.",
    "store": "The row store through `Embeddings`, without a model, a reader or a run.",
    "train": "`hotrow train` itself (product), with the run file of `hotrow demo`, and that run as a loop of a user's "
    "own.",
}
"""What each benchmark runs, and so what its figures say of a user's run."""

PEERS = (
    ("a plain PyTorch loop on two cores, numbered keys in memory", "train.cpu.vs_torch"),
    ("FBGEMM's CPU kernels", "store.vs_fbgemm_cpu"),
    ("FBGEMM's CPU kernels, 2M rows a table", "store.vs_fbgemm_cpu_2m"),
    ("`nn.EmbeddingBag(sparse=True)` with Adagrad", "store.vs_torch"),
    ("FBGEMM's managed cache on the GPU", "hot.vs_fbgemm_uvm"),
    ("FBGEMM's GPU kernels, the grouping counted in", "kernels.zipf128.counted"),
    ("FBGEMM's GPU kernels, the grouping given", "kernels.zipf128.given"),
    ("FBGEMM's GPU kernels on the expanded batch", "kernels.ikjt5"),
    ("TorchRec's best plan on Gloo", "shard.vs_torchrec"),
    ("Persia's package", "hybrid.vs_persia"),
)

_REACHED: dict[bool | None, str] = {True: "reached", False: "**not reached**", None: ""}


class Answer(NamedTuple):
    """What a figure came to, as text: its value, whether it reached what it must (or why it is missing), where."""

    value: str
    reached: str
    machine: str


_NOT_RUN = Answer("not taken", "this benchmark was not run", "")


def answers(reports: Sequence[Mapping[str, Any]]) -> dict[str, Answer]:
    """Every figure of some reports by its id; what is missing in one may be in another."""
    found: dict[str, Answer] = {}
    for report in reports:
        for gap in report["missing"]:
            found.setdefault(gap["id"], Answer("not taken", gap["reason"], ""))
    for report in reports:
        for result in report["results"]:
            must = "" if result["must"] is None else f" (must {result['must']:g})"
            found[result["id"]] = Answer(
                figure(result["value"], result["unit"]) + must, _REACHED[result["met"]], place(report["machine"])
            )
    return found


def place(machine: Mapping[str, Any]) -> str:
    """A machine in a word: its accelerator, or its cores."""
    return str(machine.get("device") or f"{machine.get('cores')} CPU cores")


def claims_table(reports: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: every published result with what was measured for it."""
    found = answers(reports)
    columns = (
        *("system", "published", "on", "figure here", "kind", "value", "reached", "machine", "what differs"),
        "command",
    )
    rows: list[tuple[str, ...]] = []
    for claim in CLAIMS:
        answer = found.get(claim.id, _NOT_RUN)
        command = f"`hotrow bench {command_of(claim.id)}`"
        figure_of = (claim.id, kind_of(claim.id))
        rows.append((claim.system, claim.published, claim.workload, *figure_of, *answer, claim.differs, command))
    return columns, rows


def peers_table(reports: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: every peer with the ratio against it."""
    found = answers(reports)
    return ("peer", "figure", "kind", "ratio", "reached", "machine"), [
        (peer, id, kind_of(id), *found.get(id, _NOT_RUN)) for peer, id in PEERS
    ]


def kind_of(id: str) -> str:
    """Whether a figure is of what users run, or of a part of it."""
    return PRODUCT if id.startswith(PRODUCT_FIGURES) else PART


def command_of(id: str) -> str:
    """The benchmark that takes a figure."""
    bench, figure_of = id.split(".", 1)
    return f"{bench}_auc" if figure_of == "auc_gap" and bench in ("hot", "cache") else bench
