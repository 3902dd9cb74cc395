"""Ranks that exchange over NCCL, rows on the device and in host memory, give what one process with plain tables gives.

They share one device, so this shows that the bytes are right, not how fast they go.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranks_tiers import PLAN, assert_equal_to_plain, dealt, job_of, named_plans, small_case

from ranks import Ranks
from shapes import ON_DEVICE, PHASES, cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA device")


@pytest.fixture(scope="module", params=["nccl", "cpu:gloo,cuda:nccl"])
def ranks(request) -> Iterator[Ranks]:
    with Ranks(4, request.param) as pool:
        yield pool


@pytest.mark.parametrize(("size", "device_rows"), [(2, ()), (4, ("replicated", "node"))])
@settings(max_examples=3, phases=PHASES, deadline=None)
@given(data=st.data())
def test_any_plan_equals_one_process_with_plain_tables(ranks, size, device_rows, data):
    case = data.draw(cases(steps=3 * size, optimizers=ON_DEVICE))
    job = job_of(case, [data.draw(named_plans(case.tables)) for _ in range(3)])
    job.device, job.device_rows = data.draw(st.booleans()), device_rows
    each = dealt(case.batches, size)
    seen = ranks.run(size, "rank_work:train", job, each=each, node_size=2, timeout=120)
    assert_equal_to_plain(case, job, each, seen)


def test_a_plan_puts_its_rows_on_the_device(ranks):
    case = small_case(8)
    job = job_of(case, [PLAN, PLAN, PLAN])
    seen = ranks.run(2, "rank_work:train_on_device", job, each=dealt(case.batches, 2), timeout=120)
    assert all(rank["replicated"] and rank["node"] and not rank["world"] for rank in seen)
