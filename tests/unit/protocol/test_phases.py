"""Phases of a run of momenta, against what they say in words, counted one by one."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from atoll.protocol.phases import Phases

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
KINDS = [
    (warmup, gradients, local, most)
    for warmup, gradients, local, most in itertools.product(
        (0, 1, 2, 5, 40), (0, 1, 2, 3, 16), (0, 1, 3), (2, 3, 4, 16, 32)
    )
]


def phases(warmup: int, gradients: int = 0, local: int = 0, most: int = 16) -> Phases:
    return Phases(warmup_commits=warmup, gradient_doubling=gradients, local_doubling=local, most_local_steps=most)


def of_gradients(warmup: int, doubling: int) -> set[int]:
    """One interval after the other."""
    found: set[int] = set()
    commit, interval = 1, 1
    while commit <= warmup:
        for _ in range(doubling or warmup):
            found.add(commit)
            commit += interval
        interval *= 2
    return {c for c in found if c <= warmup}


def windows(warmup: int, doubling: int, most: int, num: int) -> list[int]:
    found, size = [1] * warmup, 1
    while len(found) < num:
        found += [min(size, most)] * (doubling or 1)
        size = 2 * size if doubling else 1
    return found[:num]


@pytest.mark.parametrize(("warmup", "gradients", "local", "most"), KINDS)
def test_each_commit_counted_one_by_one(warmup: int, gradients: int, local: int, most: int) -> None:
    found, wanted = phases(warmup, gradients, local, most), of_gradients(warmup, gradients)
    steps = windows(warmup, local, most, 99)
    for commit in range(1, 100):
        where = f"commit {commit}"
        assert found.is_of_gradients(commit) is (commit in wanted), where
        assert found.num_of_gradients(commit) == len([c for c in wanted if c <= commit]), where
        assert found.last_of_momenta(commit) == max(set(range(1, commit + 1)) - wanted, default=0), where
        assert found.steps(commit) == steps[commit - 1], where
        assert found.is_local(commit) is (steps[commit - 1] > 1), where
        assert found.steps_until(commit) == sum(steps[:commit]), where
    assert found.num_of_gradients(0) == found.steps_until(0) == found.last_of_momenta(0) == 0


def test_the_vectors_of_docs_protocol() -> None:
    (block,) = re.findall(r"```json phase-vector\n(.*?)```", PAGE.read_text(), re.S)
    for case in json.loads(block):
        found = Phases(**{key: value for key, value in case.items() if key not in ("of_gradients", "steps")})
        assert [c for c in range(1, 100) if found.is_of_gradients(c)] == case["of_gradients"]
        assert {commit: found.steps(int(commit)) for commit in case["steps"]} == case["steps"]


def test_without_a_warm_up_nothing_is_of_gradients() -> None:
    found = phases(0)
    assert not any(found.is_of_gradients(c) for c in range(1, 9))
    assert [found.last_of_momenta(c) for c in (0, 1, 1 << 40)] == [0, 1, 1 << 40]


def test_numbers_of_long_runs_cost_no_walk() -> None:
    found = phases(1 << 40, 16, 100, 16)
    assert not found.is_of_gradients((1 << 39) + 3)
    assert found.num_of_gradients(1 << 40) == 577
    assert phases(1 << 40).last_of_momenta(1 << 40) == 0
    assert found.steps_until((1 << 40) + 1000) == (1 << 40) + 100 * (1 + 2 + 4 + 8) + 600 * 16
