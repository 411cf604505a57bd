"""Every mutation: the rule that it breaks, the text that it replaces, and the tests that must notice.

`old` occurs exactly once in its file; one that does not is an error, so that this table stays true. Keep it short.
"""

from __future__ import annotations

from dataclasses import dataclass

SCENARIOS = "tests/unit/coordinator/test_core_scenarios.py"
REFUSED = "tests/unit/coordinator/test_refused_messages.py"
COORDINATOR_STORIES = "tests/golden/test_coordinator_stories.py"
COORDINATOR_LEASES = "tests/unit/coordinator/test_data_leases.py"
DISPUTES = "tests/unit/coordinator/test_disputes.py"
ROLLBACK = "tests/unit/coordinator/test_rollback.py"
STORES = "tests/unit/coordinator/test_store_contract.py"
SQLITE = "tests/unit/coordinator/test_sqlite_store.py"
SITE = "tests/unit/node_core/test_site.py"
SITE_STORIES = "tests/golden/test_site_stories.py"
SITE_LEASES = "tests/unit/node_core/test_leases.py"
OUTER = "tests/unit/dataplane/test_outer_state.py"
PAYLOADS = "tests/unit/dataplane/test_payload_log.py"
SYNC_DATA = "tests/unit/dataplane/test_sync_data.py"
SAVED = "tests/unit/dataplane/test_saved_model.py"
PLANS = "tests/unit/protocol/test_plans.py"
LAYOUT = "tests/unit/protocol/test_layout.py"
HELD = "tests/unit/exchange/test_held.py"
SOURCES = "tests/unit/exchange/test_sources.py"
KERNELS = "tests/unit/codecs/test_codec_kernels.py"
WORKERS = "tests/unit/local/test_worker_group.py"
PIECES = "tests/unit/local/test_pieces.py"
STREAMS = "tests/unit/exchange/test_streams.py"
EXCHANGE = "tests/process/test_exchange.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    name: str
    rule: str
    """What the code promises, and this takes away."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # --- the coordinator: what is decided, kept and sent
    Mutation(
        name="send before persist",
        rule="a decision is kept before it is sent",
        file="coordinator/core/events.py",
        old="taken, self.outputs = self.outputs, []",
        new="taken, self.outputs = sorted(self.outputs, key=lambda o: isinstance(o, Persist)), []",
        tests=(COORDINATOR_STORIES,),
    ),
    Mutation(
        name="plan is not kept",
        rule="a plan is kept before it is sent, and no attempt is planned twice after a restart",
        file="coordinator/core/driver.py",
        old="    run.persist(record)\n    sync.begin(",
        new="    sync.begin(",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="commit and next sync in two transactions",
        rule="a commit and the sync that it opens are kept as a whole",
        file="coordinator/core/events.py",
        old="            if isinstance(output, Persist):\n",
        new="            if False:\n",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="judge by the newest epoch",
        rule="a message is judged by the plan of its own sync: who joins meanwhile does not disturb it",
        file="coordinator/core/driver.py",
        old="    base = attempt.plan.base_commit\n    if message.last_commit != base:",
        new="    base = attempt.plan.base_commit\n    if site.epoch < run.members.epoch:\n        return\n"
        "    if message.last_commit != base:",
        tests=(COORDINATOR_STORIES,),
    ),
    Mutation(
        name="commit with unequal digests",
        rule="a commit needs the same payload digest from every live contributor",
        file="coordinator/core/driver.py",
        old="if len({d.payload_digest for d in dones}) > 1:",
        new="if False:",
        tests=(COORDINATOR_STORIES,),
    ),
    Mutation(
        name="another state goes on",
        rule="a site whose state is not the run's is evicted and fetches it",
        file="coordinator/core/states.py",
        old="    for site_id in judgement.losers:\n",
        new="    for site_id in ():\n",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="commit lists the survivors",
        rule="a commit lists the plan's contributors, those lost meanwhile included",
        file="coordinator/core/decisions.py",
        old="        contributors=plan.contributors,\n",
        new="        contributors=tuple(c for c in plan.contributors if c.site_id in attempt.survivors({})),\n",
        tests=(SCENARIOS, COORDINATOR_LEASES),
    ),
    Mutation(
        name="Done of an older attempt counts",
        rule="once a higher attempt is planned, Dones of lower ones count no longer",
        file="coordinator/core/driver.py",
        old="(plan.sync, plan.attempt, plan.term) == (sync, attempt, term)",
        new="(plan.sync, plan.term) == (sync, term)",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="contribution changes after Ready",
        rule="a contribution never changes: a second Ready with other tokens or data is not taken",
        file="coordinator/core/driver.py",
        old="(known.tokens, known.ranges) != (message.tokens, message.ranges)",
        new="False",
        tests=("tests/unit/coordinator/test_ready.py",),
    ),
    Mutation(
        name="discarded contribution takes part again",
        rule="who discarded a planned contribution takes no part in that sync again",
        file="coordinator/core/driver.py",
        old="    if (site.site_id, site.incarnation) in sync.voided:\n        return",
        new="    if False:\n        return",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="lost site's contribution stays",
        rule="a lost site costs one more attempt, without it",
        file="coordinator/core/run.py",
        old="        sync.drop(site.site_id, site.incarnation)\n",
        new="",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="same plan again",
        rule="identical plans are never issued again",
        file="coordinator/core/syncs.py",
        old="if (ids, trees) not in self._issued:",
        new="if True:",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="attempts without end",
        rule="attempts are bounded; then the sync is abandoned",
        file="coordinator/core/driver.py",
        old="if attempt.plan.attempt >= MAX_ATTEMPTS:",
        new="if False:",
        tests=(SCENARIOS, "tests/unit/coordinator/test_deadlines.py"),
    ),
    Mutation(
        name="weight 0 contributes",
        rule="weight 0 means receiver; all weights 0 abandons the sync",
        file="coordinator/core/driver.py",
        old="if sync.ready[s.site_id].tokens > 0]",
        new="if sync.ready[s.site_id].tokens >= 0]",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="first report of a state wins",
        rule="where state hashes differ, the majority is right",
        file="coordinator/core/commits.py",
        old="best = [h for h in counts if counts[h] == max(counts.values())]",
        new="best = list(counts)[:1]",
        tests=(COORDINATOR_STORIES, DISPUTES),
    ),
    Mutation(
        name="a tie is decided by who was first",
        rule="in a tie nobody is believed before the sites have looked for damage",
        file="coordinator/core/commits.py",
        old="            if len(best) > 1 and here:\n",
        new="            if False:\n",
        tests=(DISPUTES,),
    ),
    Mutation(
        name="a paused coordinator evicts everybody",
        rule="time in which the coordinator stood still is nobody's silence",
        file="coordinator/core/own_time.py",
        old="        self._lost_s += own - due\n        return due, own - due",
        new="        return own, 0.0",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="old start of a node is heard",
        rule="a message of another incarnation is refused",
        file="coordinator/core/machine.py",
        old="elif header.incarnation != site.incarnation:",
        new="elif False:",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="a lower incarnation takes over",
        rule="an older start of a node never takes the place of a newer one",
        file="coordinator/core/admission.py",
        old="    if header.incarnation < site.incarnation:\n",
        new="    if False:\n",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="another key takes the name",
        rule="a name belongs to the key that took it first",
        file="coordinator/core/admission.py",
        old="if not run.members.same_key(site, key_digest(message.key)):",
        new="if False:",
        tests=(COORDINATOR_STORIES,),
    ),
    Mutation(
        name="second name on a stream",
        rule="a refused message changes nothing but its own stream",
        file="coordinator/core/admission.py",
        old="if on_stream is not None and on_stream.name != message.name:",
        new="if False:",
        tests=(REFUSED,),
    ),
    Mutation(
        name="state ahead of the log is let in",
        rule="a site ahead of the coordinator's log means a wrong store",
        file="coordinator/core/admission.py",
        old="if message.branch > run.branch or (message.has_state and message.last_commit > run.log.last):",
        new="if False:",
        tests=(SCENARIOS, COORDINATOR_STORIES, ROLLBACK),
    ),
    Mutation(
        name="another model is let in",
        rule="a site with another manifest is refused at the door",
        file="coordinator/core/admission.py",
        old="if theirs.digest != ours.digest:",
        new="if False:",
        tests=(COORDINATOR_STORIES,),
    ),
    Mutation(
        name="site id is used again",
        rule="a site's id is never given to another",
        file="coordinator/core/membership.py",
        old="site.site_id = next(reversed(self._by_id), 0) + 1",
        new="site.site_id = len(self.live()) + 1",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="who does not hear is kept",
        rule="a site that sends but no longer hears is lost",
        file="coordinator/core/machine.py",
        old="elif stream.unacked_since is not None and run.now >= stream.unacked_since + limits.lease_s:",
        new="elif False:",
        tests=(SCENARIOS,),
    ),
    Mutation(
        name="no lease after a restart",
        rule="after a coordinator's restart members have one full lease to come back",
        file="coordinator/core/membership.py",
        old="away_until=now + lease_s if r.live else None",
        new="away_until=now if r.live else None",
        tests=(SCENARIOS, COORDINATOR_STORIES),
    ),
    Mutation(
        name="store takes an older term",
        rule="every transaction of the store checks the term",
        file="coordinator/sqlite_store.py",
        old="if stored != term:",
        new="if stored < term:",
        tests=(STORES,),
    ),
    Mutation(
        name="released lock",
        rule="a second coordinator on the same store is refused",
        file="coordinator/sqlite_store.py",
        old="PRAGMA locking_mode = EXCLUSIVE",
        new="PRAGMA locking_mode = NORMAL",
        tests=(SQLITE,),
    ),
    Mutation(
        name="rolled back too early",
        rule="without an operator the run goes back only when everybody who may have more is accounted for",
        file="coordinator/core/rollback.py",
        old="if not found.obstacle and not found.absent:",
        new="if not found.obstacle:",
        tests=(ROLLBACK,),
    ),
    Mutation(
        name="data of void commits stays done",
        rule="a rollback returns the ranges of the commits that it voids",
        file="coordinator/core/rollback.py",
        old="            run.ledger.void(line.line, line.ranges)\n",
        new="            pass\n",
        tests=(ROLLBACK,),
    ),
    Mutation(
        name="void commits come back",
        rule="commits after a rollback are of a new branch; who holds void ones is told, and comes without them",
        file="coordinator/core/admission.py",
        old="    if has_void_commits:\n",
        new="    if False:\n",
        tests=(ROLLBACK,),
    ),
    # --- data: each sample once
    Mutation(
        name="data of others in Ready",
        rule="a Ready that lists ranges which its incarnation does not lease is refused",
        file="coordinator/core/leases.py",
        old="if is_canonical(ranges, MAX_POSITION) and held.holds_all(ranges):",
        new="if True:",
        tests=(COORDINATOR_LEASES,),
    ),
    Mutation(
        name="lost lease is not returned",
        rule="a leased range goes back to the pool when its lease ends without a commit",
        file="coordinator/core/ledger.py",
        old="        line.returned.update(lease.minus(kept))\n",
        new="",
        tests=(COORDINATOR_LEASES,),
    ),
    Mutation(
        name="done range is leased again",
        rule="a range is done if and only if a commit lists it",
        file="coordinator/core/ledger.py",
        old="                lease.difference_update(ranges)\n",
        new="                line.returned.update(ranges)\n",
        tests=(COORDINATOR_LEASES,),
    ),
    Mutation(
        name="crashed workers' samples are lost",
        rule="what crashed workers had drawn is drawn again",
        file="node/core/leases.py",
        old="    data.append(data.leased.minus(reserved))\n",
        new="",
        tests=(SITE_LEASES, SITE_STORIES),
    ),
    # --- a site
    Mutation(
        name="lower term is accepted",
        rule="sites refuse messages of a lower term",
        file="node/core/site.py",
        old="if term < site.term:",
        new="if False:",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="joiner keeps its own reference",
        rule="a joiner discards a state that is not the run's and fetches it",
        file="node/core/site.py",
        old="if message.admitted_as is m.AdmittedAs.JOINER and site.outer is not None:",
        new="if False:",
        tests=(SITE,),
    ),
    Mutation(
        name="no discard after eviction",
        rule="after eviction a site discards local progress: its ranges went back to the pool",
        file="node/core/site.py",
        old="        syncs.discard_local(self.ctx)\n        self.site.open = None",
        new="        self.site.open = None",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="straggler keeps its old base",
        rule="a site that applies a commit without contributing moves its local copy and its base by the same amount",
        file="node/core/answers.py",
        old="return MergeMode.REPLACE if step == workers.base_step else MergeMode.SHIFT",
        new="return MergeMode.REPLACE if step == workers.base_step else MergeMode.MERGE",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="snapshot of an old base is contributed",
        rule="a pseudo-gradient is taken from the base that the site holds",
        file="node/core/workforce.py",
        old="    if site.outer is not None and snapshot.base_commit != site.outer.commit:\n",
        new="    if False:\n",
        tests=(SITE,),
    ),
    Mutation(
        name="steps beyond the boundary are lost",
        rule="inner steps after the boundary survive the commit",
        file="node/core/answers.py",
        old="return MergeMode.REPLACE if step == snapshot.step else MergeMode.MERGE",
        new="return MergeMode.REPLACE",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="overrun without end",
        rule="with the coordinator away a site trains a bounded number of steps beyond the boundary",
        file="node/core/answers.py",
        old="if away and workers.overrun_left > 0:",
        new="if away:",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="stale attempt is taken for the one that runs",
        rule="what comes late of an older attempt is nothing",
        file="node/core/syncs.py",
        old="return exchange if (plan.sync, plan.term, plan.attempt) == (sync, term, attempt) else None",
        new="return exchange",
        tests=(SITE,),
    ),
    Mutation(
        name="older plan replaces a newer one",
        rule="plans are ordered by term and attempt",
        file="node/core/syncs.py",
        old="    if exchange is not None and (exchange.plan.sync,",
        new="    if False and (exchange.plan.sync,",
        tests=(SITE, SITE_STORIES),
    ),
    Mutation(
        name="commit is applied before its payloads are here",
        rule="a commit is applied when its payloads are in the log",
        file="node/core/syncs.py",
        old="    if exchange is not None and exchange.payload_digest is None and not exchange.broken:\n        return\n"
        "    if publish_is_in_use",
        new="    if publish_is_in_use",
        tests=(SITE,),
    ),
    Mutation(
        name="PUBLISH changes under its readers",
        rule="the outer state does not move on while a shift reads the versions before",
        file="node/core/syncs.py",
        old="    return site.publishing is not None or shifting\n",
        new="    return False\n",
        tests=(SITE,),
    ),
    Mutation(
        name="report of dead workers counts",
        rule="a snapshot is sealed by the workers that write it; a death in WRITING discards it",
        file="node/core/workforce.py",
        old="    if event.generation != site.workers.generation or snapshot.phase is not SnapshotPhase.WRITING:\n",
        new="    if snapshot.phase is not SnapshotPhase.WRITING:\n",
        tests=("tests/unit/node_core/test_odd_messages.py",),
    ),
    Mutation(
        name="contributed snapshot is sent again",
        rule="what a commit holds is not contributed again",
        file="node/core/syncs.py",
        old="        snapshot.committed_in = commit.commit\n",
        new="        pass\n",
        tests=(SITE, SITE_STORIES),
    ),
    # --- ranks of one site
    Mutation(
        name="unequal steps of ranks",
        rule="unequal step counts within a site are an error that names the ranks",
        file="node/daemon/worker_group.py",
        old="if (step, seq) != (point.step, point.seq):",
        new="if seq != point.seq:",
        tests=(WORKERS,),
    ),
    Mutation(
        name="donors take the link from a sync",
        rule="while an exchange sends, those that catch up get a frame at a time and a ninth of the bytes",
        file="node/exchange/uplink.py",
        old="return self.num_given == 0 and (not self._num_sending or self._credit_bytes >= 0)",
        new="return self.num_given == 0",
        tests=("tests/unit/exchange/test_uplink.py",),
    ),
    Mutation(
        name="replicas are compared once",
        rule="copies of a slice are compared at the first sync and every so many after it",
        file="node/daemon/worker_group.py",
        old="(self._syncs_to_check or REPLICAS_EVERY_SYNCS) - 1",
        new="(self._syncs_to_check or (1 << 60)) - 1",
        tests=(WORKERS,),
    ),
    Mutation(
        name="tokens of a data rank count twice",
        rule="ranks that see the same batch are counted once",
        file="node/daemon/worker_group.py",
        old="tokens=sum(count for count, _ in tokens.values()),",
        new="tokens=sum(r.tokens for r in reports),",
        tests=(WORKERS,),
    ),
    Mutation(
        name="overlapping slices",
        rule="the ranks' slices tile every tensor exactly once",
        file="node/daemon/pieces.py",
        old="return None if len(boxes) == 1 else (prefix, tuple(rank for _, rank in boxes))",
        new="return None",
        tests=(PIECES,),
    ),
    # --- the exchange
    Mutation(
        name="changed contribution is taken",
        rule="a reducer holds one contribution of a key, for ever the same",
        file="node/exchange/held.py",
        old="if found.hash != encoded.hash:",
        new="if False:",
        tests=(HELD,),
    ),
    Mutation(
        name="chunk without hash check",
        rule="every encoded chunk is checked against the hash that travels with it",
        file="node/exchange/exchange.py",
        old="if self.data.payload_hash(item.data) != item.hash:",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="weights from headers that differ",
        rule="a site's weight is the plan's, the same in all its chunks",
        file="node/exchange/hub.py",
        old="if member.tokens != message.tokens:",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="another plan is exchanged",
        rule="two sites exchange chunks of the same plan only",
        file="node/exchange/hub.py",
        old="if message.plan_digest != exchange.plan_digest:",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="old attempt finds the new exchange",
        rule="messages of an older attempt are refused for good, early ones get not yet",
        file="node/exchange/hub.py",
        old="if order < _order(exchange.plan):",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="late stream of a sync that is over",
        rule="a stream for a sync that is over is refused for good",
        file="node/exchange/hub.py",
        old="            if message.sync in self._dropped or (",
        new="            if False and (",
        tests=(STREAMS,),
    ),
    Mutation(
        name="stream of another start",
        rule="identity is site id and incarnation, everywhere",
        file="node/exchange/hub.py",
        old="if member.incarnation != header.incarnation:",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="too much is retained",
        rule="what a reducer retains has a bound; a plan that cannot respect it is refused",
        file="node/exchange/exchange.py",
        old="if need > max_retained_bytes:",
        new="if False:",
        tests=(STREAMS,),
    ),
    Mutation(
        name="re-encode at the reducer",
        rule="a payload is encoded once and forwarded byte for byte",
        file="node/exchange/exchange.py",
        old="        self.payloads.append(encoded)\n",
        new="        again = self.data.reduce(chunk, [(1, encoded.data), (2, encoded.data)])\n"
        "        self.payloads.append(Encoded(chunk, again, self.data.payload_hash(again)))\n",
        tests=(f"{EXCHANGE}::test_all_sites_hold_the_reference_payloads",),
    ),
    Mutation(
        name="weights are left out of the digest",
        rule="the digest of Done covers contributors and weights",
        file="protocol/plans.py",
        old="    for member in plan.contributors:\n"
        "        digest.uint(member.site_id).uint(member.incarnation).uint(member.tokens)\n",
        new="",
        tests=(PLANS,),
    ),
    Mutation(
        name="unattested hash list is believed",
        rule="a joiner checks each hash list against the attested state hash",
        file="node/exchange/sources.py",
        old="if self.attested.get(commit) != state_hash(self._manifest, self._slots, hashes):",
        new="if False:",
        tests=(SOURCES,),
    ),
    Mutation(
        name="a sign of life is progress",
        rule="only chunk bytes count as progress of a peer",
        file="node/exchange/progress.py",
        old="        if num_bytes > 0:\n",
        new="        if True:\n",
        tests=("tests/unit/exchange/test_progress.py",),
    ),
    # --- arithmetic
    Mutation(
        name="forget the last chunk",
        rule="every element of every tensor is in a chunk",
        file="protocol/layout.py",
        old="for first in range(0, max(1, spec.num_elements), chunk_elements):",
        new="for first in range(0, max(1, spec.num_elements - chunk_elements + 1), chunk_elements):",
        tests=(LAYOUT,),
    ),
    Mutation(
        name="base without the cast",
        rule="the base is what the worker received: fp32(cast(outer))",
        file="node/dataplane/sync_data.py",
        old='            if dtype != "F32":\n',
        new="            if False:\n",
        tests=(SYNC_DATA,),
    ),
    Mutation(
        name="average in another order",
        rule="contributions are summed in the order of site ids",
        file="node/dataplane/sync_data.py",
        old="        for tokens, data in contributions:\n",
        new="        for tokens, data in reversed(contributions):\n",
        tests=(SYNC_DATA,),
    ),
    Mutation(
        name="average without weights",
        rule="the average is weighted by tokens",
        file="node/dataplane/sync_data.py",
        old="np.float32(tokens / total)",
        new="np.float32(1 / len(contributions))",
        tests=(SYNC_DATA,),
    ),
    Mutation(
        name="non-finite passes",
        rule="non-finite values are refused at the encoder and at the reducer",
        file="protocol/codecs/kernels.py",
        old="    if not finite:\n",
        new="    if False:\n",
        tests=(SYNC_DATA,),
    ),
    Mutation(
        name="shift forgets the old base",
        rule="a shift is the difference of the two bases",
        file="node/dataplane/publish.py",
        old="kernels.subtract(new, place, place)",
        new="place[:] = new",
        tests=("tests/unit/dataplane/test_outer_update.py",),
    ),
    # --- the disk
    Mutation(
        name="accept a late chunk",
        rule="a payload is made once: another one for the same chunk is refused",
        file="node/dataplane/payload_file.py",
        old="if held is not None and held != hash:",
        new="if False:",
        tests=(PAYLOADS,),
    ),
    Mutation(
        name="sealed without the last payload",
        rule="Done means that all payloads are in the log",
        file="node/dataplane/payload_file.py",
        old="return [c for c in self._chunks if c not in self._hashes]",
        new="return [c for c in self._chunks[:-1] if c not in self._hashes]",
        tests=(PAYLOADS,),
    ),
    Mutation(
        name="payload without hash check",
        rule="a payload that is read from the log has its hash",
        file="node/dataplane/payload_file.py",
        old="if payload_hash(data) != expected:",
        new="if False:",
        tests=(PAYLOADS,),
    ),
    Mutation(
        name="commit of other payloads",
        rule="a commit is recorded over payloads that have its digest",
        file="node/dataplane/payload_log.py",
        old="            if held.digest(commit) != commit.payload_digest:\n",
        new="            if False:\n",
        tests=(PAYLOADS,),
    ),
    Mutation(
        name="apply out of order",
        rule="a chunk goes from each commit to the next one only",
        file="node/dataplane/outer_state.py",
        old="if old.version != version - 1:",
        new="if old.version >= version:",
        tests=(OUTER,),
    ),
    Mutation(
        name="overlap of slots",
        rule="no two chunks share a place on the disk",
        file="node/dataplane/outer_state.py",
        old=" is not newest or entry.slot in taken:",
        new=" is not newest:",
        tests=(OUTER,),
    ),
    Mutation(
        name="torn write loses the chunk",
        rule="a write that is torn at any byte leaves the old record in force",
        file="node/dataplane/outer_index.py",
        old="(2 * chunk + entry.serial % 2) * ENTRY_BYTES",
        new="(2 * chunk) * ENTRY_BYTES",
        tests=(OUTER,),
    ),
    Mutation(
        name="record is not checked on start",
        rule="on start each chunk is checked against its hash",
        file="node/dataplane/outer_state.py",
        old="chunk_hash(self._record(chunk, entry.slot).data) == entry.hash",
        new="True",
        tests=(OUTER,),
    ),
    Mutation(
        name="state hash covers the commit number",
        rule="the state hash covers manifest, slots and values, never commit numbers",
        file="node/dataplane/outer_state.py",
        old="entry = Entry(version, self._serials[chunk] + 1, slot, chunk_hash(record.data))",
        new="entry = Entry(version, self._serials[chunk] + 1, slot, chunk_hash(record.tobytes() + bytes([version])))",
        tests=(SAVED, OUTER),
    ),
)
