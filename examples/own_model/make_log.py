"""Ratings in the layout of MovieLens, made so that there is something to find: no download needed.

    python examples/own_model/make_log.py ratings.csv --events 100000

Every user likes four of forty genres and goes round among them: after a film of one comes, most of the time, a film of
the next. Within a genre some films are seen far more often than others.
"""

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

USERS, FILMS, GENRES, LIKED = 2_000, 2_000, 40, 4


def ratings(events: int, seed: int) -> pa.Table:
    """So many events, by time."""
    random = np.random.default_rng(seed)
    liked = np.argsort(random.random((USERS, GENRES)), axis=1)[:, :LIKED]
    user = random.integers(0, USERS, events)
    turn = np.zeros(USERS, np.int64)
    genre = np.empty(events, np.int64)
    follows = random.random(events) < 0.8
    for event, who in enumerate(user.tolist()):
        turn[who] += 1
        genre[event] = liked[who, turn[who] % LIKED] if follows[event] else random.integers(GENRES)
    rank = np.minimum(random.zipf(1.4, events) - 1, FILMS // GENRES - 1)  # within the genre
    pleased = (liked[user] == genre[:, None]).any(axis=1)
    rating = np.clip(np.round(np.where(pleased, 4.4, 2.8) + random.normal(0, 0.5, events)), 1, 5)
    time = np.sort(random.integers(1_600_000_000, 1_700_000_000, events))
    return pa.table({"userId": user, "movieId": rank * GENRES + genre, "rating": rating, "timestamp": time})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    csv.write_csv(ratings(wanted.events, wanted.seed), wanted.file)
    print(f"{wanted.events:,} ratings in {wanted.file}")


if __name__ == "__main__":
    main()
