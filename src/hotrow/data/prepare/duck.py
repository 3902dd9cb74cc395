"""DuckDB as the tasks of `prepare` use it: within their share of the memory, spilling to the work folder.

It groups, sorts and joins the few columns that decide where samples go, never whole samples: it holds rows by the
thousand whatever their width, and could not sort rows of 4 kB in 100 MB. It takes up to 50 MB beyond its own limit and
wants 100 MB for each thread, as measured, so it gets half of a task's room and no more threads than that is enough for.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotrow.errors import SettingsError
from hotrow.settings import Settings

MIB = 1 << 20
_LEAST = 100 * MIB
"""What DuckDB cannot do without, for each thread."""


class Share(Settings):
    """What a task may use of the machine."""

    memory: int
    threads: int


@contextmanager
def duckdb(share: Share, work: Path) -> Iterator[Any]:
    """A connection that keeps within `share`; its temporary files are gone afterwards."""
    import duckdb as engine

    temp = work / "temp" / str(os.getpid())
    temp.mkdir(parents=True, exist_ok=True)
    memory = max(_LEAST, room(share) // 2)
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory}B",
        "threads": max(1, min(share.threads, memory // _LEAST)),
        "temp_directory": str(temp),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    try:
        with engine.connect(config=config) as connection:
            connection.execute("SET enable_progress_bar = false")
            yield connection
    except (engine.Error, OSError) as error:
        raise _told(error, share) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def room(share: Share) -> int:
    """What a task has left to hold samples in."""
    return max(0, share.memory - resident())


def stream(connection: Any, query: str, rows: int = 1 << 13) -> Iterator[pa.RecordBatch]:
    """The result of a query, some rows at a time, never as a whole."""
    yield from connection.sql(query).to_arrow_reader(rows)


def parquet(files: Sequence[Path]) -> str:
    """Parquet files as a table of a query."""
    listed = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
    return f"read_parquet([{listed}])"


def resident() -> int:
    """Bytes of memory this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _told(error: Exception, share: Share) -> Exception:
    text = str(error)
    if "Out of Memory" in text:
        return SettingsError(
            f"{share.memory // MIB} MiB of memory are too little for a task of this log. Give prepare more with "
            f"--memory, or fewer tasks at a time with --workers."
        )
    if "No space left" in text or "no space" in text.lower():
        return OSError(errno.ENOSPC, "No space left on device")
    return error
