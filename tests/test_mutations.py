"""Whatever is damaged of what Hotrow wrote, reading it gives the same values or a sentence."""

from collections import Counter

import pytest

from mutation_targets import TARGETS
from mutations import GOOD, Job, Outcome, run


def shares(count: int) -> list[Job]:
    """Mutations of every target: so many of what has checksums, and as many a target of what has none."""
    checked = sum(target.checked for target in TARGETS.values())
    return [Job(name, 0, -(-count // checked)) for name in TARGETS]


def bad(found: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in found if outcome.outcome not in GOOD]


def test_damage_is_refused_with_a_sentence_or_changes_no_value(tmp_path):
    jobs = shares(225)
    found = run(tmp_path, jobs)
    assert len(found) == sum(job.last for job in jobs)
    assert not bad(found), bad(found)[0].what
    refused = Counter(outcome.target for outcome in found if outcome.outcome == "refused")
    assert set(refused) == set(TARGETS)


@pytest.mark.slow
def test_ten_thousand_mutations_are_refused_with_a_sentence_or_change_no_value(tmp_path):
    found = run(tmp_path, shares(10_000))
    print(Counter((outcome.target, outcome.outcome) for outcome in found))
    assert sum(TARGETS[outcome.target].checked for outcome in found) >= 10_000
    assert not bad(found), "\n\n".join(f"{o.target} {o.seed} {o.outcome}: {o.what}" for o in bad(found))


def test_the_search_sees_other_values_traces_crashes_and_hangs(tmp_path):
    def outcomes(name: str, count: int, patience: float) -> list[str]:
        return [found.outcome for found in run(tmp_path, [Job(name, 0, count, "mutation_faults")], patience)]

    assert {"other", "trace"} <= set(outcomes("unchecked", 20, 60))
    assert outcomes("crashes", 2, 60) == ["crash", "crash"]
    assert outcomes("hangs", 1, 1) == ["hang"]
