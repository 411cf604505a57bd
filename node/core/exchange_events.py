"""What an exchange under way says, and that it is done."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.messages import Averaged, LinkUse, Plan, Signature, SignedErrors

Outlying = tuple[int, float, float]
"""Whose contribution, its norm, and its limit."""


@dataclass(frozen=True, slots=True)
class ProductsMade:
    """In a run that averages by influence: this site has all contributions to what it reduces, and has multiplied them
    with each other."""

    plan: Plan
    products: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExchangeFinished:
    """All payloads of the plan are in the log."""

    plan: Plan
    payload_digest: bytes
    tokens: tuple[int, ...] = ()
    """The weights of the contributors, as they were averaged here."""
    stood_out: Outlying | None = None
    """Of the contributions that were averaged here, the one that was nearest to its limit."""
    links: tuple[LinkUse, ...] = ()
    averaged: Averaged | None = None
    payloads_root: bytes = b""  # with audits: over the payloads that were made here
    signature: Signature | None = None  # of that; None in plain text
    errors: SignedErrors | None = None  # with audits and error feedback of averages: of what was made here
