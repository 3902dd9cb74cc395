"""Ratings in the layout of MovieLens (userId,movieId,rating,timestamp), with tastes to learn: no download needed.

    python examples/movielens_sequence/make_log.py ratings.csv --events 100000

Films have a genre, users like two or three genres, and popular films are rated more often; so what a user rated well
before says what comes next.
"""

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

USERS, FILMS, GENRES = 2_000, 3_000, 12


def ratings(events: int, seed: int) -> pa.Table:
    """So many events, by time."""
    random = np.random.default_rng(seed)
    genre = random.integers(0, GENRES, FILMS)
    taste = np.where(random.random((USERS, GENRES)) < 0.2, 1.6, -0.8)
    quality = random.normal(0, 0.4, FILMS)
    user = random.integers(0, USERS, events)
    film = np.minimum(random.zipf(1.15, events) - 1, FILMS - 1)
    liking = 3.4 + taste[user, genre[film]] + quality[film] + random.normal(0, 0.6, events)
    rating = np.clip(np.round(liking * 2) / 2, 0.5, 5.0)
    time = np.sort(random.integers(1_600_000_000, 1_700_000_000, events))
    return pa.table({"userId": user + 1, "movieId": film + 1, "rating": rating, "timestamp": time})


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
