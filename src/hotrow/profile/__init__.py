"""Profile: how often each key is used (`KeyCounts`) and how much samples repeat each other (`Repetition`)."""

from hotrow.profile.counts import KeyCounts
from hotrow.profile.factor import Factors, expected, reached, stored
from hotrow.profile.groups import find_groups
from hotrow.profile.profile import PROFILE, Profile, fingerprint
from hotrow.profile.repetition import Repetition

__all__ = [
    "PROFILE",
    "Factors",
    "KeyCounts",
    "Profile",
    "Repetition",
    "expected",
    "find_groups",
    "fingerprint",
    "reached",
    "stored",
]
