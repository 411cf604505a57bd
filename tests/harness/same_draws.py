"""What hypothesis draws depends on the test alone, not on which modules this process happens to have loaded.

Hypothesis mixes constants that it finds in the source of all local modules into what it draws. Without `install` a test
draws other values alone than among others, and other ones again in another process of a parallel run.
"""

from __future__ import annotations

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants


def install() -> None:
    """For the life of this process. Constants that hypothesis itself brings are still drawn."""
    if not callable(getattr(providers, "_get_local_constants", None)):
        raise RuntimeError(
            "this version of hypothesis has no _get_local_constants: see where it takes constants of local modules "
            "from now, and keep them from what it draws, or else failures are not repeatable"
        )
    nothing = Constants()
    providers._get_local_constants = lambda: nothing
