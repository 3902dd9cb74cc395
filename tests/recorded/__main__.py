"""`python -m recorded`, in tests/: records the runs of the fixture, or compares two records."""

import argparse
import sys
import tempfile
from pathlib import Path

from ranks import Ranks
from recorded.fixture import HERE, NAMES, RECORDED, Fixture, differences, read, stated, write


def record(out: Path) -> None:
    """Trains all runs, and writes what they came to."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, Ranks(2) as ranks:
        fixture = Fixture(Path(folder), ranks)
        fixture.make_data()
        for name in NAMES:
            found[name] = fixture.train(name, Path(folder) / "runs" / name)
            print(f"{name:16} loss {found[name].losses[-1]:.4f}  auc {found[name].metrics['auc']:.4f}", flush=True)
    write(out, found)


def main() -> int:
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m recorded", description=__doc__)
    asked = parser.add_subparsers(dest="asked", required=True)
    recording = asked.add_parser("record", help="train all runs and write what they came to")
    recording.add_argument("--out", type=Path, default=RECORDED)
    comparing = asked.add_parser("same", help="compare the bits of two records")
    comparing.add_argument("records", type=Path, nargs=2)
    asked.add_parser("settings", help="write settings that are new into the run files")
    given = parser.parse_args()
    if given.asked == "record":
        record(given.out)
    elif given.asked == "settings":
        for name in NAMES:
            (HERE / "run_files" / f"{name}.toml").write_text(stated(name))
    else:
        differ = differences(*map(read, given.records))
        print("\n".join(f"{name}: other bits" for name in differ) or "the same bits")
        return int(bool(differ))
    return 0


if __name__ == "__main__":
    sys.exit(main())
