"""Who may come in, and as what: Hello and Offer."""

from __future__ import annotations

import hmac
import logging
from dataclasses import replace

from atoll.coordinator.core.events import Certified
from atoll.coordinator.core.log import rollback, states
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites import bans, invites, manifests, resetting
from atoll.coordinator.core.sites.membership import Site, Standing, key_digest
from atoll.protocol import PROTOCOL_VERSION, addresses, endpoints
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.settings import SITE_NAME, needing_changes

KEY_BYTES = 32
HASH_BYTES = 32
MAX_INCARNATION = 1 << 63  # stores keep signed integers
MAX_STARTS = 1 << 20
"""Between two Hellos: nobody takes all the numbers that there are from whoever has the name next."""


def hello(run: Run, stream: int, header: m.Header, message: m.Hello) -> None:
    """The first message of a stream, or the one after Evicted."""
    if refusal := _refusal(run, stream, header, message):
        run.refuse(stream, *refusal)
        return
    shared = rollback.shared_commit(run, message.branch)
    has_void_commits = _has_void_commits(run, message)
    if has_void_commits:  # it is told, and comes without them
        message = replace(message, has_state=False, last_commit=0, state_hash=b"")
    site = _identify(run, stream, header, message)
    if has_void_commits and site.live:
        run.remove(site, "its newest commits were rolled back", evicted=False)
    elif site.start in run.log.voided_starts and shared is not None and site.live:
        # The ranges of its snapshot, which it may not know to be void, are not its leases any more.
        run.remove(site, f"it contributed to what was rolled back to commit {shared}", evicted=True)
    run.log.says_hello(site.start)
    site.says_hello(message, run.now)
    state, before = run.members.streams[stream], site.record()
    site.address = message.address
    site.knocks(knows=state.evicted_said)
    if site.record() != before:
        run.persist_site(site)
    state.evicted_said = False
    welcome = m.Welcome(
        settings_json=needing_changes(run.settings_json) if run.changes.changed_json else run.settings_json,
        site_id=site.site_id,
        last_commit=run.log.last,
        started=run.started,
        parent_json=run.parent_json,
        error_commits=run.log.contributed(site.site_id) if run.settings.sync.error_feedback else (),
        changed_json=run.changes.changed_json,
        takes_logged=True,
    )
    run.send(site, welcome)
    run.tell_banned(site)
    if shared is not None:
        run.send(site, rollback.message(run, shared))
    if run.finished is not None:
        _hello_after_the_end(run, site, message)
    elif site.evicted:
        state.evicted_said = True
        state.waiting_since = run.now
        run.send(site, m.Evicted(reason=site.evicted[:1024]))
    elif site.live:
        states.resume(run, site, message)


def _has_void_commits(run: Run, message: m.Hello) -> bool:
    """Whether the newest commits that it holds were rolled back."""
    shared = rollback.shared_commit(run, message.branch)
    return shared is not None and message.has_state and message.last_commit > shared


def _refusal(run: Run, stream: int, header: m.Header, message: m.Hello) -> Refusal | None:
    """Why the site does not come in, whoever it is; None if it does."""
    name, site, on_stream = message.name, run.members.sites.get(message.name), run.members.streams[stream].site
    if not SITE_NAME.fullmatch(name):
        text = f"{name!r} is no name of a site: 1 to 64 letters, digits, ., _ or -, the first a letter or digit"
        return RefusedKind.INVALID, text
    if header.protocol_version != PROTOCOL_VERSION:
        return RefusedKind.PROTOCOL, (
            f"{name} speaks protocol version {header.protocol_version} (atoll {message.atoll_version}), this "
            f"coordinator speaks {PROTOCOL_VERSION}: install the same version of atoll on both"
        )
    if header.run_id and header.run_id != run.run_id:
        return RefusedKind.RUN, (
            f"{name} belongs to run {header.run_id!r}, this coordinator has run {run.run_id!r}: "
            "connect to the right coordinator, or give the node another --home"
        )
    if header.term > run.term:
        return RefusedKind.STATE, (
            f"{name} has seen term {header.term} of run {run.run_id!r}, this coordinator is in term {run.term}: "
            f"{states.WRONG_STORE}"
        )
    if problem := _invalid(site, header, message):
        return RefusedKind.INVALID, f"Hello of {name!r}: {problem}"
    certified = run.members.streams[stream].certified
    if certified is None and addresses.relayed(message.address) is not None:
        return RefusedKind.INVALID, f"{name} at {message.address}: a run in plain text has no relays, which know nobody"
    if certified is not None and certified.name != name:
        return RefusedKind.INVALID, f"the certificate of {certified.name} says Hello as {name}: each is itself alone"
    digest = _digest(run, stream, message)
    if (refusal := bans.refusal(run, message.name, digest) or resetting.refusal(run, message)) is not None:
        return refusal
    if certified is not None and (problem := invites.refusal(run, "site", name, digest)):
        return RefusedKind.NAME_TAKEN, problem
    if on_stream is not None and on_stream.name != name:
        text = f"{name!r} says Hello on a stream of {on_stream.label}; each site has a stream of its own"
        return RefusedKind.INVALID, text
    if site is None and header.site_id:
        return RefusedKind.STALE, (
            f"site {header.site_id} ({name}) is forgotten: it was gone and had never contributed; start the node again"
        )
    if site is not None and (refusal := _refusal_by_name(run, site, header, message, certified)) is not None:
        return refusal
    has_more = message.has_state and message.last_commit > run.log.last
    if message.branch > run.branch or (has_more and not _has_void_commits(run, message)):
        return states.ahead(run, name, message.last_commit, message.branch)
    if site is None and run.members.num_at_the_door() >= run.settings.max_sites:
        text = f"{name}: run {run.run_id!r} takes {run.settings.max_sites} sites (run.max_sites), and as many"
        return RefusedKind.FULL, f"{text} that were never in it have said Hello and wait: come back later"
    return None


def _invalid(site: Site | None, header: m.Header, message: m.Hello) -> str:
    if len(message.key) != KEY_BYTES:
        return f"the key has {len(message.key)} bytes, not {KEY_BYTES}"
    before = site.incarnation if site is not None else 0
    if not 0 < header.incarnation < MAX_INCARNATION or header.incarnation > before + MAX_STARTS:
        return f"the incarnation is {header.incarnation}; it counts the node's starts from 1, and was {before} last"
    if problem := addresses.problem_with(
        message.address, message.name
    ):  # whoever is to dial it would fail, not the site
        return f"{problem}; use --advertise HOST:PORT"
    if message.has_state and len(message.state_hash) != HASH_BYTES:
        return f"the state hash has {len(message.state_hash)} bytes, not {HASH_BYTES}"
    return ""


def _digest(run: Run, stream: int, message: m.Hello) -> bytes:
    """Of the key by which the site is known: that of its certificate, where it has one."""
    certified = run.members.streams[stream].certified
    return certified.key_digest if certified is not None else key_digest(message.key)


def _refusal_by_name(
    run: Run, site: Site, header: m.Header, message: m.Hello, certified: Certified | None
) -> Refusal | None:
    """Why this start of the node does not have the name: it is another site's, the start is over, or another process is
    that start, and both would contribute under one key. None if it has. A certificate that counts has the name."""
    # Takes as long for any key. Of a certificate it was asked already which one counts.
    is_its_key = certified is not None or hmac.compare_digest(site.key_digest, key_digest(message.key))
    if not is_its_key:
        return RefusedKind.NAME_TAKEN, (
            f"the name {site.name!r} is taken in run {run.run_id!r} by a site with another key: choose another --name, "
            "or start the node with the --home that holds its key"
        )
    if header.incarnation < site.incarnation:
        return RefusedKind.STALE, (
            f"{site.label}: start {header.incarnation} of this node is over, start {site.incarnation} has taken its "
            "place: end the old process"
        )
    known = site.hello if header.incarnation == site.incarnation else None
    if known is not None and message.process_id != known.process_id:
        return RefusedKind.STALE, (
            f"{site.label}: another process is start {site.incarnation} of this node, at {site.address}: the --home of "
            "one is a copy of the other's; end one of them, and start it with a --home and a --name of its own"
        )
    return None


def _identify(run: Run, stream: int, header: m.Header, message: m.Hello) -> Site:
    """The site of this name, on this stream from now on."""
    site = run.members.sites.get(message.name)
    digest, is_certified = _digest(run, stream, message), run.members.streams[stream].certified is not None
    if site is None:
        site = Site(name=message.name, key_digest=digest, incarnation=header.incarnation)
        run.members.came(site)
    elif header.incarnation > site.incarnation:
        _supersede(run, site, header.incarnation, stream)
    site.has_key(digest, is_certified=is_certified)
    if site.stream is not None and site.stream != stream:
        run.close(run.members.release(site), "the site has opened another stream")
    run.members.attach(site, stream)
    return site


def _supersede(run: Run, site: Site, incarnation: int, stream: int) -> None:
    text = f"{site.label} was started again (incarnation {incarnation}); start {site.incarnation} is over"
    if site.stream is not None and site.stream != stream:
        old = run.members.release(site)
        run.send_on(old, m.Refused(kind=RefusedKind.SUPERSEDED, text=text))
        run.close(old, "superseded")
    run.report(logging.INFO, text)
    run.remove(site, "started again", evicted=False)
    site.starts_again(incarnation)
    run.persist_site(site)


def _hello_after_the_end(run: Run, site: Site, message: m.Hello) -> None:
    assert run.finished is not None
    known = run.log.attested.get(message.last_commit)
    if message.has_state and known in (None, message.state_hash):
        # It may have the payloads in its log, and be the only one who does.
        for commit in run.log.after(message.last_commit):
            run.send(site, commit)
    if message.has_state and site.live:
        states.take(run, site, message.last_commit, message.state_hash)
    run.send(site, run.finished_message())


def offer(run: Run, stream: int, site: Site, message: m.Offer) -> None:
    """A site wants to take part: it is admitted, refused, or waits for its time or for the manifest."""
    if run.finished is not None:
        site.waits(None)  # else its time, which has come, would be waited for again and again
        run.send(site, run.finished_message())
        return
    if (banned := bans.refusal(run, site.name, site.key_digest)) is not None:  # since its Hello, while it was not in
        site.waits(None)
        run.refuse(stream, *banned)
        return
    if site.standing is Standing.OUT:
        return  # it has yet to hear that it was evicted
    if run.settings.data != "local" and len(message.data_fingerprint) != HASH_BYTES:
        text = (
            f"{site.label} offers no fingerprint of its data, and the run asks for data {run.settings.data!r}: give "
            f"atoll.join(data_fingerprint=...) {HASH_BYTES} bytes that are the same for the same data, or start a run "
            'with data = "local"'
        )
        run.refuse(stream, RefusedKind.DATA, text)
        return
    if not manifests.is_the_runs(run, message):
        manifests.wait(run, stream, message)
        return
    if problem := manifests.other_data(run, site, message):
        run.refuse(stream, RefusedKind.DATA, problem)
        return
    if not site.live and len(run.members.live()) >= run.settings.max_sites:
        text = (
            f"{site.label}: run {run.run_id!r} has as many sites as it takes (run.max_sites = {run.settings.max_sites})"
        )
        run.refuse(stream, RefusedKind.FULL, f"{text}: come back when one has left")
        return
    if problem := _wrong_endpoints(run, site, message):
        run.refuse(stream, RefusedKind.INVALID, f"{site.label}: {problem}")
        return
    if not site.live and run.now < site.conduct.admitted_again_at:
        site.waits(message)  # `advance` admits it
        return
    site.waits(None)
    site.max_retained_bytes = message.max_retained_bytes
    site.bandwidth_bytes_per_s = message.bandwidth_bytes_per_s
    site.endpoints = message.endpoints
    if site.live:  # after a new stream, or with restarted workers: it goes on as what it is
        run.persist_site(site)
        run.send(site, states.admitted(run, site))
        return
    if not site.site_id:
        run.members.give_id(site)
    hello = site.hello
    assert hello is not None
    standing, why = place(run, site, hello)
    site.admit(standing, run.now)
    run.failures.is_back(site.name)
    # What it said of states before it says again, but for those from which it has come to that of its disk.
    has_computed = run.log.is_heard(hello.last_commit, site.site_id)
    run.log.forget(site.site_id, since=hello.last_commit if standing is Standing.MEMBER else 0)
    run.persist_site(site)
    answer = states.admitted(run, site)
    level = logging.INFO
    if answer.state_hash:
        level = logging.ERROR
        site.num_wrong_states += 1
        run.num_wrong_states += 1
    run.report(level, f"admitted {site.label} at {site.address} as {standing.name.lower()}: {why}")
    run.send(site, answer)
    if standing is Standing.MEMBER:
        states.take(run, site, hello.last_commit, hello.state_hash, has_computed=has_computed)
        if not site.catching_up:  # else it asks for sources
            states.send_pending(run, site)


def _wrong_endpoints(run: Run, site: Site, message: m.Offer) -> str:
    """Each is in every plan, so of all sites together they are bounded."""
    num_others = sum(len(other.endpoints) for other in run.members.live() if other is not site)
    if num_others + len(message.endpoints) > m.MAX_MEMBERS:
        return f"the sites of a run have at most {m.MAX_MEMBERS} hosts beside their first ones, and these are here"
    return endpoints.problem_with(message.endpoints, run.chunk_sizes.num_chunks)


def advance(run: Run) -> None:
    """Offers that have waited for the manifest of the run, or for the time of sites that were evicted before."""
    for site in list(run.members.sites.values()):
        if site.waits_with is not None and site.stream is not None and run.now >= site.conduct.admitted_again_at:
            offer(run, site.stream, site, site.waits_with)
    for stream, message in manifests.advance(run):
        state = run.members.streams.get(stream)
        if state is not None and state.site is not None:
            offer(run, stream, state.site, message)


def place(run: Run, site: Site, hello: m.Hello) -> tuple[Standing, str]:
    """What a site comes in as, and why."""
    log = run.log
    if hello.has_state:
        commit = hello.last_commit
        known = log.attested.get(commit, run.claim if commit == 0 else None)
        newer = [s for s in run.members.connected() if s.applied is not None and s.applied > commit]
        if known is None and commit < log.last and not log.after(commit) and newer:
            return Standing.JOINER, f"its state of commit {commit} is older than the log"
        # Its word counts as much as what is attested, unless it was found out.
        is_new = log.last - commit < run.settings.sync.most_in_flight  # contributors may not have been heard
        has_computed = site.site_id in log.contributors(commit) or log.is_heard(commit, site.site_id)
        is_party = is_new and has_computed and not site.conduct.is_on_trial
        if known is None or known == hello.state_hash or is_party:
            return Standing.MEMBER, f"it holds commit {commit} of {log.last}"
        return Standing.JOINER, (
            f"its state of commit {commit} has hash {hello.state_hash.hex()[:12]}, the run's is {known.hex()[:12]}"
        )
    if states.needs_seeder(run) and states.may_seed(run, site):
        return Standing.SEEDER, "nobody holds a starting state yet"
    if hello.from_saved_model and not run.started:
        return Standing.JOINER, "another site makes the starting state; its saved model is not used"
    return Standing.JOINER, f"it fetches the state of commit {log.last}"
