"""Sites that have joined a run: their keys, with certificates of its root."""

from __future__ import annotations

from datetime import timedelta

from atoll.coordinator.core.events import Certified
from atoll.protocol.dates import date_of
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.trust.words import Words

NOW, DAY = date_of(1.764e9), timedelta(days=1)


class SiteKeys:
    """Of one run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.root = certificates.Root.made(bytes(16), 3650 * DAY, NOW)
        self._tls: dict[str, MutualTls] = {}

    def tls(self, name: str, kind: Kind = Kind.SITE_IDENTITY, *, anew: bool = False) -> MutualTls:
        """`anew`: with another key than before."""
        if anew or name not in self._tls:
            key = certificates.new_key()
            certificate = self.root.sign(key.public_key(), Subject(self.run_id, kind, name), DAY, NOW)
            roots, pem = certificates.to_pem(self.root.certificate), certificates.key_to_pem(key)
            self._tls[name] = MutualTls(self.run_id, Shown(roots, certificates.to_pem(certificate), pem))
        return self._tls[name]

    def words(self, name: str) -> Words:
        return Words(self.run_id, self.tls(name))

    def certified(self, name: str) -> Certified:
        """As the coordinator knows a stream of that site."""
        certificate = certificates.from_pem(self.tls(name).shown.certificate)[0]
        return Certified(name, certificates.digest_of(certificate))
