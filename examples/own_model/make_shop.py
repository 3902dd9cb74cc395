"""Views of a shop with two labels, what is clicked and what is bought of it, made so that there is something to find.

    python examples/own_model/make_shop.py shop.parquet --events 100000

Users click items of their own kind. They buy what they have clicked if it is cheap, or if they are among those who
spend. Keys are any int64.
"""

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, ITEMS, KINDS = 1_000, 500, 5


def views(events: int, seed: int) -> pa.Table:
    """So many views, by time."""
    random = np.random.default_rng(seed)
    user = random.integers(0, USERS, events)
    item = np.minimum(random.zipf(1.3, events), ITEMS) - 1
    price = np.random.default_rng(1).normal(0, 1, ITEMS)[item] + random.normal(0, 0.2, events)
    liked = user % KINDS == item % KINDS
    popular = np.sin(item * 1.7)
    click = random.random(events) < 1 / (1 + np.exp(1.5 - 3.0 * liked - popular))
    spends = user // KINDS % 3 == 0
    buy = click & (random.random(events) < 1 / (1 + np.exp(1.0 + 2.0 * price - 3.0 * spends)))
    return pa.table(
        {
            "click": click.astype(np.float32),
            "buy": buy.astype(np.float32),
            "price": price.astype(np.float32),
            "user": user * 1_000_003,
            "item": item * 7**15,
            "hour": random.integers(0, 24, events),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    pq.write_table(views(wanted.events, wanted.seed), wanted.file)
    print(f"{wanted.events:,} views in {wanted.file}")


if __name__ == "__main__":
    main()
