"""Host rows: the same rows whichever way they travel."""

import pytest
import torch

from hotrow.errors import SettingsError
from hotrow.kernels.host import WAYS, HostRows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [5, 20, 300])
def test_rows_come_and_go_unchanged(device: str, way: str, dim: int) -> None:
    rows = torch.randn(50, dim)
    rows = rows.pin_memory() if device == "cuda" else rows
    before = rows.clone()
    host = HostRows(rows, device, way)
    numbers = torch.randperm(50)[:17]
    taken = host.gather(numbers)
    assert taken.device.type == device and torch.equal(taken.cpu(), before[numbers])
    host.scatter(numbers, taken + 1)
    if device == "cuda":
        torch.cuda.synchronize()
    before[numbers] += 1
    assert torch.equal(rows, before)


def test_measuring_leaves_the_rows_as_they_were(device: str) -> None:
    rows = torch.randn(50, 8)
    rows = rows.pin_memory() if device == "cuda" else rows
    before = rows.clone()
    host = HostRows(rows, device)
    assert torch.equal(rows, before)
    assert host.gather_way in WAYS and host.scatter_way in WAYS
    assert len(host.seconds) == (4 if device == "cuda" else 0)


def test_what_cannot_be_host_rows_is_refused(device: str) -> None:
    with pytest.raises(SettingsError, match="matrix"):
        HostRows(torch.randn(5), device)
    with pytest.raises(SettingsError, match='"direct" or "staged"'):
        HostRows(torch.randn(5, 2), device, "quick")
