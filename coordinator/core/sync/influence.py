"""What each contribution counts in an average by influence (`sync.robust = "gram"`): its share of the geometric median,
found by the inner products that reducers say. The coordinator sees no tensor. Pure.

A site's distance counts with the tokens of its weight, but with no more than the median contributor has: it says its
tokens itself, and one that said more than half of all would be the median. What a reducer says is of its own chunks;
the products of all chunks are the sums over reducers, in the order of their ids. A reducer that lies moves shares; each
stays between 0 and 1, and their sum 1.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.records import InfluencesRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync import geometric_median
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol import messages as m

WHOLE = 1 << 30
"""The sum of influences, about."""


def heard(run: Run, site: Site, message: m.Products) -> None:
    """The first word of a reducer of the attempt under way counts. A site that says what no contributions have is
    evicted."""
    attempt = run.attempt_of(site, message)
    if attempt is None or site.site_id not in attempt.reducing():
        run.report(
            logging.DEBUG, f"{site.label}: Products of sync {message.sync} attempt {message.attempt} count no longer"
        )
        return
    if problem := geometric_median.problem_of(message.products, len(attempt.ids())):
        attempt.spoil(f"{site.label} says {problem}")
        run.evict(site, f"as a reducer of sync {message.sync} it says {problem}", Cause.CONTRADICTION)
        return
    attempt.note_products(site.site_id, message.products)


def is_awaited(run: Run, attempt: Attempt) -> bool:
    """Whether reducers wait for it."""
    return run.settings.sync.averages_by_influence and not attempt.influences


def owing(attempt: Attempt) -> set[int]:
    """Reducers whose products are missing."""
    return attempt.reducing().difference(attempt.products)


def decide(run: Run, attempt: Attempt) -> InfluencesRecord | None:
    """Of an attempt that is weighed, once all its reducers have said their products; None before, and after."""
    if not is_awaited(run, attempt) or owing(attempt):
        return None
    said = [attempt.products[site_id] for site_id in sorted(attempt.products)]
    products = [sum(of_reducers) for of_reducers in zip(*said, strict=True)]
    found = geometric_median.shares(products, voices(attempt.weights.tokens))
    plan = attempt.plan
    return InfluencesRecord(
        sync=plan.sync,
        attempt=plan.attempt,
        influences=tuple(max(1, round(share * WHOLE)) for share in found),
    )


def voices(tokens: tuple[int, ...]) -> list[float]:
    """Of each contributor: its tokens, at most those of the median one; of an even number the one that has fewer."""
    most = sorted(tokens)[(len(tokens) - 1) // 2]
    return [float(min(count, most)) for count in tokens]
