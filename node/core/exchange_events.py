"""What an exchange under way says, beside its end."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.messages import Plan


@dataclass(frozen=True, slots=True)
class ProductsMade:
    """In a run that averages by influence: this site has all contributions to what it reduces, and has multiplied them
    with each other."""

    plan: Plan
    products: tuple[float, ...]
