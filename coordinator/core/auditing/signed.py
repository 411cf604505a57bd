"""What sites sign in a run with audits, as the coordinator hears it: by the key of their identity, so that an audit can
show it. In plain text nobody has a key, and nothing is signed."""

from __future__ import annotations

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.messages import Done, Made, Plan, Ready, Signature, SignedErrors
from atoll.protocol.plans import top_of, with_weights
from atoll.protocol.spec import Way, spec_of
from atoll.protocol.trust.words import is_by, of_contributions, of_errors, of_payloads


def wrong_in_ready(run: Run, site: Site, message: Ready) -> str:
    """Empty if nothing is. Of a site that contributes."""
    if len(message.contributions_root) != DIGEST_BYTES:
        return "no root over what it contributes, which a run with audits needs"
    word = of_contributions(run.run_id, message.sync, site.start, message.contributions_root)
    return _wrong(site, word, message.signature)


def wrong_in_done(run: Run, site: Site, attempt: Attempt, message: Done) -> str:
    """The same, of a site that may have made payloads."""
    if not run.settings.sync.audits or not attempt.has(site.start):
        return ""
    if not message.payloads_root:
        return "no root over the payloads that it made" if _makes_any(run, attempt, site) else ""
    if len(message.payloads_root) != DIGEST_BYTES or not attempt.is_weighed:
        return "a root over payloads that cannot be"
    plan = with_weights(attempt.plan, attempt.weights.tokens, attempt.influences)
    way = spec_of(run.settings.sync, plan.base_commit, plan.fragment).trainable
    word = of_payloads(run.run_id, plan, way, site.start, message.payloads_root)
    return _wrong(site, word, message.signature) or _wrong_in_errors(run, site, plan, way, message.errors)


def _wrong_in_errors(run: Run, site: Site, plan: Plan, way: Way, errors: SignedErrors | None) -> str:
    """Of a site that made payloads."""
    if (errors is None) != (not way.error_beta_down):
        return "no roots over the errors of what it averaged" if errors is None else "roots over errors that cannot be"
    if errors is None:
        return ""
    return _wrong(site, of_errors(run.run_id, plan, site.start, way.error_beta_down, errors), errors.signature)


def _makes_any(run: Run, attempt: Attempt, site: Site) -> bool:
    sizes, place = run.chunk_sizes.of_sync(attempt.plan.fragment), attempt.ids().index(site.site_id)
    trees = (tree for tree in attempt.plan.trees if top_of(tree) == place)
    return any(sizes.has_payload(t.first_chunk + i) for t in trees for i in range(t.num_chunks))


def made_by(attempt: Attempt, place: int) -> Made | None:
    """What that contributor says that it made; None if it was gone before it could, or says nothing."""
    site_id = attempt.plan.contributors[place].site_id
    done = attempt.done.get(site_id)
    if done is None or not done.payloads_root:
        return None
    trees = [tree for tree in attempt.plan.trees if top_of(tree) == place]
    return Made(
        site_id=site_id,
        first_chunks=tuple(tree.first_chunk for tree in trees),
        nums_chunks=tuple(tree.num_chunks for tree in trees),
        root=done.payloads_root,
        signature=done.signature,
        errors=done.errors,
    )


def _wrong(site: Site, word: bytes, signature: Signature | None) -> str:
    if not site.is_certified:
        return "" if signature is None else "a signature, in a run in plain text"
    if signature is None or not is_by(site.key_digest, word, signature):
        return "what it says is not signed by the key of its identity"
    return ""
