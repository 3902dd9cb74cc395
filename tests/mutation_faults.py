"""Readers with the faults that `mutations` looks for."""

import json
import os
import time
from pathlib import Path

from mutations import Target


def make_text(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps({"a": [1, 2, 3], "b": {"c": "text"}}))


def is_damaged(folder: Path) -> bool:
    return folder.name.endswith("-damaged")


def read_anything(folder: Path) -> str:
    return (folder / "a.json").read_text()


def read_and_die(folder: Path) -> str:
    if is_damaged(folder):
        os._exit(1)
    return ""


def read_for_ever(folder: Path) -> str:
    while is_damaged(folder):
        time.sleep(60)
    return ""


TARGETS = {
    "unchecked": Target(make_text, read_anything),
    "crashes": Target(make_text, read_and_die),
    "hangs": Target(make_text, read_for_ever),
}
