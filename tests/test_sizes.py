"""Sizes mean what people write."""

import pytest

from hotrow.errors import SettingsError
from hotrow.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2kib", 2048),
        ("1_000b", 1000),
        ("3T", 3 * 10**12),
    ],
)
def test_a_size_is_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1.2.3GB", "5 parsecs", "1e9", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingsError, match="is not a memory budget. Write a number and a unit"):
        parse_size(text, "a memory budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (512 << 20, "512.0 MiB"), (5 << 50, "5,120.0 TiB")],
)
def test_a_size_is_said(count, text):
    assert size_text(count) == text
