"""A small log in memory whose truth is known: chunks of sessions that repeat themselves, over Zipf-like keys."""

import numpy as np

from hotrow.profile.counts import KeyCounts
from hotrow.profile.sample import Chunk, Sample

SAMPLES = 60


def log(chunks, seed=0, items=3_000, users=800):
    """Chunks of 60 samples, five a session; two tables, one with a key and a list of two a sample."""
    random = np.random.default_rng(seed)
    heights = np.cumsum(np.arange(1, items + 1) ** -1.1)
    everyone = np.arange(SAMPLES)

    def drawn(n):
        return np.searchsorted(heights / heights[-1], random.random(n))

    made = []
    for _ in range(chunks):
        favourite = np.repeat(drawn(SAMPLES // 5), 5)
        item = np.where(random.random(SAMPLES) < 0.3, favourite, drawn(SAMPLES))
        user = np.repeat(random.integers(0, users, SAMPLES // 5) ** 2 // users, 5)
        owners = np.concatenate([everyone, np.repeat(everyone, 2)])
        keys = {"item": np.concatenate([item, drawn(2 * SAMPLES)]), "user": user}
        made.append(Chunk(SAMPLES, keys, {"item": owners, "user": everyone}))
    return made


def drawn_from(population, size, seed):
    picked = np.random.default_rng(seed).permutation(len(population))[:size]
    return Sample(size / len(population), lambda: iter([population[i] for i in picked]))


def counts_of(population):
    counts = {"item": KeyCounts(), "user": KeyCounts()}
    for chunk in population:
        for name, keys in chunk.keys.items():
            counts[name].add(keys)
    return counts
