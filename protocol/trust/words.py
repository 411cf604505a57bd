"""What a site says of a sync with the key of its identity, in runs with audits: whoever has the run's root can hold the
site to it, whatever the coordinator says, and later. The bytes are in docs/protocol.md, "Signed words"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.protocol.audit_messages import AuditChunk, ErrorsBefore, Signature, SignedErrors
from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.members import Member
from atoll.protocol.messages import MAX_MEMBERS, Plan
from atoll.protocol.plans import influences
from atoll.protocol.spec import Way
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls

Start = tuple[int, int]
"""Site id and incarnation."""
MAX_STARTS = 4 * MAX_MEMBERS
"""Whose keys a node remembers."""


def of_contributions(run_id: str, sync: int, start: Start, root: bytes) -> bytes:
    """A contribution is the same in all attempts at its sync, and under each term."""
    return Digest("atoll/signed-contributions/v1").text(run_id).uint(sync).uints(start).data(root).finish()


def of_payloads(run_id: str, of: Plan | AuditChunk, way: Way, start: Start, root: bytes) -> bytes:
    """`of`: with the weights and influences by which was averaged; `way`: how."""
    digest = Digest("atoll/signed-payloads/v1").text(run_id).uint(of.sync).uint(of.term).uint(of.attempt)
    digest.uint(of.fragment).uint(of.base_commit).uint(len(of.contributors))
    digest.uints(value for c in of.contributors for value in (c.site_id, c.incarnation, c.tokens))
    digest.uints(influences(of))
    digest.text(way.up).text(way.down).text(way.aggregation.name).text(way.robust).text(repr(float(way.clip))).uint(
        way.trim
    )
    return digest.uints(start).data(root).finish()


def of_errors(
    run_id: str, of: Plan | AuditChunk | ErrorsBefore, start: Start, beta: float, errors: SignedErrors
) -> bytes:
    """What a reducer added to its averages, times beta, and what its codec left of them, in that attempt."""
    digest = Digest("atoll/signed-errors/v1").text(run_id).uint(of.sync).uint(of.term).uint(of.attempt).uints(start)
    return digest.text(repr(float(beta))).data(errors.before).data(errors.after).finish()


def is_by(key_digest: bytes, word: bytes, signature: Signature) -> bool:
    """Whether the key of that digest has signed it."""
    try:
        certificate = certificates.from_der(signature.certificate)
        return certificates.digest_of(certificate) == key_digest and certificates.is_signature(
            certificate, word, signature.value
        )
    except InvalidMessage:
        return False


def check(
    run_id: str, name: str, word: bytes, signature: Signature, roots: Sequence[certificates.Certificate]
) -> bytes:
    """The digest of the key by which the site of that name has signed the word. That its certificate has expired since
    does not matter. Raises InvalidMessage."""
    certificate = certificates.from_der(signature.certificate)
    subject = certificates.subject_of(certificate)
    if subject != Subject(run_id, Kind.SITE_IDENTITY, name):
        raise InvalidMessage(f"a word of site {name} with the certificate of {subject}")
    if not any(certificates.is_signed_by(certificate, root) for root in roots):
        raise InvalidMessage(f"a word of site {name} with a certificate that no root of the run has signed")
    if not certificates.is_signature(certificate, word, signature.value):
        raise InvalidMessage(f"a word that site {name} has not signed")
    return certificates.digest_of(certificate)


class Words:
    """Of one node, before its coordinator: its own, and those of others."""

    def __init__(self, run_id: str, shown: MutualTls) -> None:
        self.run_id = run_id
        self._tls = shown
        self._keys: dict[Start, bytes] = {}  # the oldest first

    def signed(self, word: bytes) -> Signature:
        shown = self._tls.shown
        key, (certificate, *_) = certificates.key_from_pem(shown.key), certificates.from_pem(shown.certificate)
        return Signature(value=certificates.signature(key, word), certificate=certificates.to_der(certificate))

    def signed_errors(
        self, of: Plan | AuditChunk | ErrorsBefore, way: Way, start: Start, errors: SignedErrors
    ) -> SignedErrors:
        """The same roots, with a signature."""
        word = of_errors(self.run_id, of, start, way.error_beta_down, errors)
        return replace(errors, signature=self.signed(word))

    def check(self, member: Member, word: bytes, signature: Signature | None) -> None:
        """That start of that site has signed it, by the key by which it signed before: whoever has the root's key can
        make certificates, and not that key. Raises InvalidMessage."""
        if signature is None:
            raise InvalidMessage(f"a word of site {member.name} that is not signed")
        roots = certificates.from_pem(self._tls.shown.roots)
        found = check(self.run_id, member.name, word, signature, roots)
        if self._keys.setdefault((member.site_id, member.incarnation), found) != found:
            raise InvalidMessage(f"a word of site {member.name} by another key than that start of it had before")
        while len(self._keys) > MAX_STARTS:
            del self._keys[next(iter(self._keys))]
