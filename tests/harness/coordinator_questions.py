"""What tests ask the coordinator's core, by name. No other test knows how the core keeps it.

Answers are names, numbers and frozen messages. What the status says of a run is asked of `view`. Sites are named; that
the core knows the site is part of most questions, which fail otherwise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.coordinator.core.core import Core
from atoll.coordinator.core.log import evidence, going_back
from atoll.coordinator.core.log.disputes import Need
from atoll.coordinator.core.records import AuditRecord
from atoll.coordinator.core.sites import liveness, manifests
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import outcomes
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.resting import Thin
from atoll.coordinator.core.sync.syncs import Sync
from atoll.coordinator.core.view.document import RunView
from atoll.protocol import messages as m
from atoll.protocol.changed import with_change
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest
from atoll.protocol.plans import reducers, with_weights
from atoll.protocol.time_limits import TimeLimits
from tests.harness.snapshots import snapshot

if TYPE_CHECKING:
    from atoll.coordinator.service import CoordinatorServer


class CoordinatorQuestions:
    core: Core
    now: float

    @property
    def view(self) -> RunView:
        return self.core.view(self.now)

    @property
    def limits(self) -> TimeLimits:
        return self.core.run.limits

    # --- the run

    def known_tokens(self) -> list[str]:
        """Ids of viewers' tokens that were given out and not taken back."""
        return self.core.token_ids

    def bans_due(self) -> list[str]:
        """Names for whose ban a time is kept."""
        return list(self.core.run.bans_due)

    def links_known(self) -> int:
        """How many directed links between sites something is known of."""
        return len(self.core.run.links.slowest(1 << 30))

    def last_commit(self) -> int:
        return self.core.run.log.last

    def run_step(self) -> int:
        """That the last commit has come to."""
        return self.core.run.log.run_step

    def logged(self) -> list[int]:
        """The commits whose records are in the log."""
        return [record.commit.commit for record in self.core.run.log.records]

    def contributors_to(self, commit: int) -> frozenset[int]:
        """Their ids; nobody's if the commit is older than the log."""
        return self.core.run.log.contributors(commit)

    def attested(self, commit: int) -> bytes | None:
        return self.attestations().get(commit)

    def attestations(self) -> dict[int, bytes]:
        """State hash by commit."""
        return dict(self.core.run.log.attested)

    def claimed_start(self) -> bytes | None:
        """The state hash of commit 0 that a site says while too few others do."""
        return self.core.run.claim

    def agreed_manifest(self) -> Manifest | None:
        found = self.core.run.manifest
        return None if found is None else found.manifest

    def num_chunks(self) -> int:
        return len(self.core.run.chunk_sizes)

    def waiting_offers(self) -> int:
        """Offers of a model whose manifest is not known yet."""
        return len(self.core.run.offers.waiting)

    def manifest_is_coming(self) -> bool:
        """A site was asked for it, and has not sent all of it."""
        return self.core.run.offers.incoming is not None

    def shut_out(self) -> tuple[str, ...]:
        """Names that hosts and relays hear."""
        return self.core.banned_names

    def is_banned(self, name: str) -> bool:
        return name in self.core.run.banned

    def audit_log(self, after: int = 0) -> list[AuditRecord]:
        return self.core.run.audit.after(after)

    def certified_refusal(self, name: str, key_digest: bytes, wall_s: float) -> str:
        """Of a site that calls with that certificate at that time."""
        return self.core.refusal("site", name, key_digest, wall_s)

    def is_paused(self) -> bool:
        """By a person."""
        return bool(self.core.run.pause_reason)

    def if_changed(self, name: str, value: str) -> str:
        """All that is changed once `name` has that value as well; as until now where it cannot be."""
        run = self.core.run
        try:
            return with_change(run.settings, run.changes.changed_json, name, value)
        except ConfigError:
            return run.changes.changed_json

    def missing_for_quorum(self) -> int:
        return self.core.missing_for_quorum()

    def goes_back_to(self) -> int | None:
        """The commit that sites are to put together; None if the run is not going back."""
        going = self.core.run.going_back
        return None if going is None else going.commit

    def waits_for_lost_state(self) -> str:
        """Why the newest commit cannot be reached, and who may still have it; empty if it can."""
        return self.core.run.unreachable

    # --- disputes

    def disputed(self) -> str:
        """Who holds different states of one commit; empty if nobody does, or that is settled."""
        return self.core.run.disputed

    def asked_for_evidence(self) -> str:
        """The site that is to show something now; empty if nobody is."""
        dispute = self.core.run.dispute
        site = self.core.run.members.by_id(dispute.asked.site_id) if dispute is not None and dispute.asked else None
        return "" if site is None else site.name

    def evidence_bytes(self) -> int:
        """The size of the answer of which parts are kept; 0 if none are."""
        dispute = self.core.run.dispute
        asked = dispute.asked if dispute is not None else None
        return 0 if asked is None or not asked.data else asked.total_bytes

    def num_shown(self) -> int:
        """Answers that are whole, of the dispute under way."""
        dispute = self.core.run.dispute
        assert dispute is not None, "nothing is disputed"
        return len(dispute.found)

    def lacking_evidence(self) -> list[Need]:
        """What the core says that nobody shows; nothing unless it cannot settle the dispute without it."""
        dispute = self.core.run.dispute
        if dispute is None:
            return []
        found = []
        for need in dict.fromkeys(need for need, _ in dispute.tried):
            of_a_side = need.evidence is m.Evidence.CHUNK_HASHES and need.commit == dispute.commit
            words = "not every side shows" if of_a_side else need.in_words()
            if words in dispute.undecided and need not in dispute.found:
                found.append(need)
        return found

    def is_evidence(self, need: Need, data: bytes) -> bool:
        """It has the hash that the core asks for."""
        check = evidence._check(self.core.run, need, len(data))
        check.more(data)
        return check.finish() == need.expected

    # --- limits that depend on the run

    def idle_limit_s(self) -> float:
        return liveness.idle_limit_s(self.core.run)

    def evidence_limit_s(self, what: m.Evidence, most_bytes: int) -> float:
        return evidence.limit_s(self.core.run, Need(evidence=what, commit=1, expected=b"", most_bytes=most_bytes))

    def manifest_part_limit_s(self) -> float:
        return manifests._part_limit_s(self.core.run)

    def longest_exchange_s(self, *names: str) -> float | None:
        """Of those that these sites were in."""
        return self.core.run.pace.longest_exchange_s([self._site(name).site_id for name in names], 1)

    # --- sites

    def known_sites(self) -> set[str]:
        return set(self.core.run.members.sites)

    def is_known(self, name: str) -> bool:
        return name in self.core.run.members.sites

    def live_sites(self) -> list[str]:
        """In the order of ids."""
        return [site.name for site in self.core.run.members.live()]

    def connected_sites(self) -> list[str]:
        """Live ones with a stream, in the order of ids."""
        return [site.name for site in self.core.run.members.connected()]

    def last_site_id(self) -> int:
        """The highest that was given."""
        return self.core.run.members.last_id

    def standing_of(self, name: str) -> str:
        """new, seeding, joining, member or out."""
        return self._site(name).standing.value

    def endpoints_of(self, name: str) -> tuple[m.Endpoint, ...]:
        """Where it has chunks beside its address."""
        return self._site(name).endpoints

    def is_live(self, name: str) -> bool:
        return self._site(name).live

    def is_connected(self, name: str) -> bool:
        return self.stream_of(name) is not None

    def stream_of(self, name: str) -> int | None:
        """None as well if the core does not know the site."""
        return self._site(name).stream if self.is_known(name) else None

    def incarnation_of(self, name: str) -> int:
        return self._site(name).incarnation

    def id_of(self, name: str) -> int:
        return self._site(name).site_id

    def holds(self, name: str) -> int | None:
        """The commit; None if it has no state, or has not said so in this session."""
        return self._site(name).applied

    def is_fetching(self, name: str) -> bool:
        """A state, from others."""
        return bool(self._site(name).fetches)

    def state_of(self, name: str) -> bytes:
        """The hash of what it holds."""
        return self._site(name).state_hash

    def evicted_because(self, name: str) -> str:
        """Empty unless it is evicted."""
        return self._site(name).evicted

    def waits_for_admission(self, name: str) -> bool:
        """It has offered, and its time has not come."""
        return self._site(name).waits_with is not None

    def admitted_again_at(self, name: str) -> float:
        return self._site(name).conduct.admitted_again_at

    def strikes_of(self, name: str) -> int:
        return self._site(name).conduct.strikes

    def has_contributed(self, name: str) -> bool:
        """Since it was admitted."""
        return self._site(name).conduct.has_contributed

    def has_ever_contributed(self, name: str) -> bool:
        return self._site(name).contributed

    # --- streams

    def streams(self) -> list[int]:
        return list(self.core.run.members.streams)

    def site_on(self, stream: int) -> str:
        """Empty before its Hello."""
        state = self.core.run.members.streams.get(stream)
        if state is None or state.site is None:
            return ""
        assert self._site(state.site.name) is state.site, "two sites of one name"
        return state.site.name

    def num_sent_on(self, stream: int) -> int:
        """Messages, whether the site has heard them or not."""
        return self.core.run.members.streams[stream].num_sent

    # --- the sync that is open

    def open_sync(self, fragment: int | None = None) -> m.Open | None:
        """Of that fragment, here and below; of the only one that has a sync."""
        sync = self._lane(fragment)
        return None if sync is None else sync.open

    def open_fragments(self) -> list[int]:
        """Those that have a sync, and the number of all if that has one."""
        return list(self.core.run.lanes)

    def newest_sync(self) -> int:
        """The highest number that was opened."""
        return self.core.run.last_sync

    def open_syncs(self) -> list[m.Open]:
        """In the order of their windows."""
        return sorted((sync.open for sync in self.core.run.lanes.values()), key=lambda opened: opened.run_step)

    def expected_ids(self, fragment: int | None = None) -> set[int]:
        """Of the sites that the sync waits for at first."""
        return set(self._sync(fragment).expected)

    def is_ready(self, name: str, fragment: int | None = None) -> bool:
        """False as well without a sync, and of a site that the core does not know."""
        sync = self._lane(fragment)
        return sync is not None and self.is_known(name) and self._site(name).site_id in sync.ready

    def diverged_ids(self) -> set[int]:
        """Of sites whose loss is not finite since the last commit."""
        run = self.core.run
        return {site_id for site_id, at in run.diverged.items() if at == (run.branch, run.log.last)}

    # --- its attempt

    def attempt(self, fragment: int | None = None) -> int:
        """0 while the sync is collected."""
        attempt = self._attempt(fragment)
        return 0 if attempt is None else attempt.plan.attempt

    def plan(self, fragment: int | None = None) -> m.Plan:
        """With the weights, if they are known."""
        attempt = self._attempt(fragment)
        assert attempt is not None, "no plan"
        return with_weights(attempt.plan, attempt.weights.tokens) if attempt.is_weighed else attempt.plan

    def weighed_plan(self) -> m.Plan | None:
        """The plan, once its weights are known."""
        attempt = self._attempt()
        return self.plan() if attempt is not None and attempt.is_weighed else None

    def reducer_ids(self) -> set[int]:
        """Of the plan."""
        return {member.site_id for member in reducers(self.plan(), self.num_chunks())}

    def contributor_ids(self, fragment: int | None = None) -> list[int]:
        """Of the plan."""
        return [member.site_id for member in self.plan(fragment).contributors]

    def is_planned(self, name: str, fragment: int | None = None) -> bool:
        """It contributes to the attempt."""
        attempt = self._attempt(fragment)
        return attempt is not None and self._site(name).site_id in attempt.ids()

    def is_done(self, name: str) -> bool:
        attempt = self._attempt()
        return attempt is not None and self._site(name).site_id in attempt.done

    def is_asked_for_payload_list(self, name: str) -> bool:
        """On the stream that it has."""
        site, attempt = self._site(name), self._attempt()
        lists = attempt.lists if attempt is not None else None
        return lists is not None and lists.asked.get(site.site_id, 0) == site.stream

    def planned_samples(self) -> tuple[tuple[m.DataRange, ...], ...]:
        """Of each contributor of the attempt."""
        attempt = self._attempt()
        assert attempt is not None, "no plan"
        return attempt.weights.ranges

    # --- what failed exchanges taught

    def held_up_others(self, sync: int) -> frozenset[int]:
        """Ids of sites that do not reduce in that sync because they did."""
        return self.core.run.trouble.held_up_others.of(sync)

    def receives_only(self, sync: int) -> frozenset[int]:
        """Ids of sites that do in that sync, as exchanges with them failed."""
        return self.core.run.trouble.receive_only.of(sync)

    def spared(self, sync: int) -> frozenset[int]:
        """Ids of all sites that receive only in that sync, whatever for."""
        return self.core.run.trouble.spared(sync)

    # --- samples

    def lines(self) -> set[int]:
        """Of positions, by number."""
        return set(self.core.run.ledger.lines)

    def done_samples(self, line: int = 0) -> tuple[m.DataRange, ...]:
        return self.core.run.ledger.lines[line].done.as_tuple()

    def leased_by(self, name: str, line: int = 0) -> tuple[m.DataRange, ...]:
        site = self._site(name)
        return self.core.run.ledger.held(line, (site.site_id, site.incarnation)).as_tuple()

    def outlived_contributions(self) -> list[tuple[int, int]]:
        """(line, site id) of those whose sites are gone while the plan may still be committed."""
        return self.core.run.ledger.kept()

    # --- arrangements: where events alone would need long to bring the core

    def evict_for(self, name: str, reason: str) -> None:
        """It was found out: a strike."""
        self.core.run.evict(self._site(name), reason, Cause.CONTRADICTION)

    def lose(self, name: str, reason: str) -> None:
        """Its grace is over."""
        self.core.run.lose(self._site(name), reason)

    def set_strikes(self, name: str, strikes: int) -> None:
        self._site(name).conduct.strikes = strikes

    def put_on_probation(self, kind: str, name: str, *, sync: int, times: int = 1) -> None:
        """`kind`: receive_only or reduce_nothing; from that sync on."""
        getattr(self.core.run.trouble, kind).note([self._site(name).site_id] * times, sync)

    def let_rest(self, name: str, every: int) -> None:
        """As if the link of that site alone were so thin. What is measured of links changes nothing meanwhile."""
        resting = self.core.run.resting
        resting._thin = {self._site(name).site_id: Thin(every=every)}
        resting.settle = lambda links, committed: []  # type: ignore[method-assign]

    def let_nobody_rest(self) -> None:
        """What is measured of links counts again."""
        resting = self.core.run.resting
        resting._thin = {}
        vars(resting).pop("settle", None)

    def forget_who_is_gone(self) -> None:
        for site in self.core.run.members.gone():
            self.core.run.members.forget(site)

    def forget_hash(self, commit: int) -> None:
        """As if no site had said what it is."""
        del self.core.run.log.attested[commit], self.core.run.log._reports[commit]

    def set_state_bytes(self, num_bytes: int) -> None:
        """The size of the model's values at each site."""
        self.core.run.state_bytes = num_bytes

    def go_back(self, commit: int, reason: str) -> str:
        """The core itself decides so. Why it is not tried; empty if it is."""
        return going_back.begin(self.core.run, commit, reason)

    def abandon_sync(self, reason: str, fragment: int | None = None) -> None:
        """As if its attempts were used up, which they may be at any time."""
        outcomes.abandon(self.core.run, self._sync(fragment), reason)
        self.core._due = self.core.run.now

    def count_looks_at_traffic(self) -> Looks:
        """At when a site of the attempt last exchanged anything, from now on."""
        attempt = self._attempt()
        assert attempt is not None, "no plan"
        attempt.traffic_at = looks = Looks()
        return looks

    # --- how the core keeps it

    def _site(self, name: str) -> Site:
        return self.core.run.members.sites[name]

    def _sync(self, fragment: int | None = None) -> Sync:
        sync = self._lane(fragment)
        assert sync is not None, "no sync is open"
        return sync

    def _lane(self, fragment: int | None = None) -> Sync | None:
        lanes = self.core.run.lanes
        return next(iter(lanes.values()), None) if fragment is None else lanes.get(fragment)

    def _attempt(self, fragment: int | None = None) -> Attempt | None:
        sync = self._lane(fragment)
        return None if sync is None else sync.attempt


class Looks(dict[int, float]):
    num = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.num += 1
        return super().get(key, default)


def of_server(server: CoordinatorServer) -> CoordinatorQuestions:
    """To the core of a coordinator that runs."""
    questions = CoordinatorQuestions()
    questions.core, questions.now = server._core, time.monotonic()
    return questions


STREAMS_AND_SIGNS_OF_LIFE = frozenset(
    {
        "out", "now", "streams", "num_refused", "num_malformed", "gone", "waits", "hello",
        "settings", "limits", "heard_at", "progress_at", "offers", "num_sources_asked",
    }
)  # fmt: skip


def decisions(core: Core) -> Any:
    """Everything that the core holds but streams, signs of life, and sites that only said Hello."""
    found = snapshot(core.run, STREAMS_AND_SIGNS_OF_LIFE)
    sites = found["members"]["sites"]
    for name in [name for name, site in sites.items() if not site["site_id"]]:
        del sites[name]
    for site in sites.values():
        if site["standing"] is Standing.NEW:
            site["standing"] = Standing.OUT
        if site["standing"] is Standing.OUT:  # what it said of itself counts from its next admission on
            for word in ("stream", "heartbeat"):
                del site[word]
    return found
