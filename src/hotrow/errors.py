"""Errors whose message is a sentence to the user: what was wrong, where, and what to do.

Everything a user can cause derives from `HotrowError`, so the command line can print the sentence
without a stack trace and a program can catch one class.
"""

import difflib
from collections.abc import Iterable


class HotrowError(Exception):
    """Base of every error that a user can cause and mend."""


class SettingsError(HotrowError):
    """A run file, a table or another setting that does not say something possible."""


class DataError(HotrowError):
    """Input data that cannot be used; names file, column and row where they are known."""


class BatchError(DataError):
    """A batch whose parts do not fit together; names the feature."""


class CheckpointError(HotrowError):
    """A checkpoint or snapshot that is missing, truncated, altered or of another shape."""


class MissedError(CheckpointError):
    """A snapshot that could not be taken now but can be again: a shard was started anew while it was written."""


class NotFiniteError(HotrowError):
    """A loss, a weight, a row or an answer that is not a finite number."""


class StoreError(HotrowError):
    """A row store asked for something it cannot do."""


class ServiceError(HotrowError):
    """A shard that cannot be reached, refuses a request or has lost its rows; names the shard."""


class RankError(HotrowError):
    """A rank that is gone, or ranks that do not do the same."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the closest known word, or the list of known ones, or nothing."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f' Did you mean "{close[0]}"?'
    if 0 < len(known) <= 30:
        return f" Known here: {', '.join(known)}."
    return ""
