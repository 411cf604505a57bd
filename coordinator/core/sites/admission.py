"""Who may come in, and as what: Hello and Offer."""

from __future__ import annotations

import logging
from dataclasses import replace

from atoll.coordinator.core.log import rollback, starting_over, states
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import keeping_out, manifests
from atoll.coordinator.core.sites.membership import Site, Standing, key_digest
from atoll.protocol import PROTOCOL_VERSION, addresses
from atoll.protocol import messages as m
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import AdmittedAs, RefusedKind
from atoll.protocol.settings import SITE_NAME

KEY_BYTES = 32
HASH_BYTES = 32
MAX_INCARNATION = 1 << 63  # stores keep signed integers
STANDING = {
    AdmittedAs.SEEDER: Standing.SEEDER,
    AdmittedAs.JOINER: Standing.JOINER,
    AdmittedAs.MEMBER: Standing.MEMBER,
}


def hello(run: Run, stream: int, header: m.Header, message: m.Hello) -> None:
    """The first message of a stream, or the one after Evicted."""
    if _refused_at_the_door(run, stream, header, message):
        return
    if keeping_out.refused(run, stream, message.name, message.key) or starting_over.refused(run, stream, message):
        return
    if _refused_by_name(run, stream, header, message):
        return
    shared = rollback.shared_commit(run, message.branch)
    has_void_commits = shared is not None and message.has_state and message.last_commit > shared
    if has_void_commits:
        # Its newest commits are void: it is told, and comes without them.
        message = replace(message, has_state=False, last_commit=0, state_hash=b"")
    if message.branch > run.branch or (message.has_state and message.last_commit > run.log.last):
        states.refuse_ahead(run, stream, message.name, message.last_commit, message.branch)
        return
    if message.name not in run.members.sites and run.members.num_at_the_door() >= run.settings.max_sites:
        text = f"{message.name}: run {run.run_id!r} takes {run.settings.max_sites} sites (run.max_sites), and as many"
        text += " that were never in it have said Hello and wait: come back later"
        run.refuse(stream, RefusedKind.FULL, text, "", str(run.settings.max_sites))
        return
    site = _identify(run, stream, header, message)
    if has_void_commits and site.live:
        run.remove(site, "its newest commits were rolled back", evicted=False)
    site.says_hello(message, run.now)
    if site.address != message.address:
        site.address = message.address
        if site.site_id:
            run.persist(site.record())
    state = run.members.streams[stream]
    was_evicted = site.evicted
    site.knocks(knows=state.evicted_said)
    if was_evicted != site.evicted:
        run.persist(site.record())
    state.evicted_said = False
    welcome = m.Welcome(
        settings_json=run.settings_json,
        site_id=site.site_id,
        last_commit=run.log.last,
        started=run.started,
        parent_json=run.parent_json,
    )
    run.send(site, welcome)
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


def _refused_at_the_door(run: Run, stream: int, header: m.Header, message: m.Hello) -> bool:
    if not SITE_NAME.fullmatch(message.name):
        text = f"{message.name!r} is no name of a site: 1 to 64 letters, digits, ., _ or -, the first a letter or digit"
        run.refuse(stream, RefusedKind.INVALID, text)
    elif header.protocol_version != PROTOCOL_VERSION:
        run.refuse(
            stream,
            RefusedKind.PROTOCOL,
            f"{message.name} speaks protocol version {header.protocol_version} (atoll {message.atoll_version}), this "
            f"coordinator speaks {PROTOCOL_VERSION}: install the same version of atoll on both",
            str(header.protocol_version),
            str(PROTOCOL_VERSION),
        )
    elif header.run_id and header.run_id != run.run_id:
        run.refuse(
            stream,
            RefusedKind.RUN,
            f"{message.name} belongs to run {header.run_id!r}, this coordinator has run {run.run_id!r}: "
            "connect to the right coordinator, or give the node another --home",
            header.run_id,
            run.run_id,
        )
    elif header.term > run.term:
        run.refuse(
            stream,
            RefusedKind.STATE,
            f"{message.name} has seen term {header.term} of run {run.run_id!r}, this coordinator is in term "
            f"{run.term}: {states.WRONG_STORE}",
            str(header.term),
            str(run.term),
        )
    elif (problem := _invalid(header, message)) is not None:
        run.refuse(stream, RefusedKind.INVALID, f"Hello of {message.name!r}: {problem}")
    else:
        return False
    return True


def _invalid(header: m.Header, message: m.Hello) -> str | None:
    if len(message.key) != KEY_BYTES:
        return f"the key has {len(message.key)} bytes, not {KEY_BYTES}"
    if not 0 < header.incarnation < MAX_INCARNATION:
        return f"the incarnation is {header.incarnation}; it counts the node's starts from 1"
    if not message.address:
        return "no address where peers reach it; use --advertise HOST:PORT"
    try:
        parse_address(message.address)
    except ConfigError as error:  # whoever is to dial it would fail, not the site
        return f"{error}, with --advertise"
    if message.has_state and len(message.state_hash) != HASH_BYTES:
        return f"the state hash has {len(message.state_hash)} bytes, not {HASH_BYTES}"
    if not addresses.is_plain(message.address):
        return f"{message.address!r} has characters that no address has; use --advertise HOST:PORT"
    return None


def _refused_by_name(run: Run, stream: int, header: m.Header, message: m.Hello) -> bool:
    """Whether the name is another site's, or this start of the node is over."""
    on_stream = run.members.streams[stream].site
    if on_stream is not None and on_stream.name != message.name:
        text = f"{message.name!r} says Hello on a stream of {on_stream.label}; each site has a stream of its own"
        run.refuse(stream, RefusedKind.INVALID, text)
        return True
    site = run.members.sites.get(message.name)
    if site is None and header.site_id:
        run.refuse(
            stream,
            RefusedKind.STALE,
            f"site {header.site_id} ({message.name}) is forgotten: it was gone and had never contributed; start the "
            "node again",
            str(header.site_id),
        )
        return True
    if site is None:
        return False
    if not run.members.same_key(site, key_digest(message.key)):
        text = (
            f"the name {message.name!r} is taken in run {run.run_id!r} by a site with another key: choose another "
            "--name, or start the node with the --home that holds its key"
        )
        run.refuse(stream, RefusedKind.NAME_TAKEN, text)
        return True
    if header.incarnation < site.incarnation:
        run.refuse(
            stream,
            RefusedKind.STALE,
            f"{site.label}: start {header.incarnation} of this node is over, start {site.incarnation} has taken its "
            "place: end the old process",
            str(header.incarnation),
            str(site.incarnation),
        )
        return True
    if header.incarnation == site.incarnation and site.hello is not None:
        return _refused_as_a_copy(run, stream, site, message)
    return False


def _refused_as_a_copy(run: Run, stream: int, site: Site, message: m.Hello) -> bool:
    """Whether another process has said Hello as this start of the node. Both would contribute under one key."""
    assert site.hello is not None
    if message.process_id == site.hello.process_id:
        return False
    text = (
        f"{site.label}: another process is start {site.incarnation} of this node, at {site.address}: the --home of one "
        "is a copy of the other's; end one of them, and start it with a --home and a --name of its own"
    )
    run.refuse(stream, RefusedKind.STALE, text)
    return True


def _identify(run: Run, stream: int, header: m.Header, message: m.Hello) -> Site:
    """The site of this name, on this stream from now on."""
    site = run.members.sites.get(message.name)
    if site is None:
        site = Site(name=message.name, key_digest=key_digest(message.key), incarnation=header.incarnation)
        run.members.came(site)
    elif header.incarnation > site.incarnation:
        _supersede(run, site, header.incarnation, stream)
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
    if site.site_id:
        run.persist(site.record())


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
    if site.standing is Standing.OUT:
        return  # it has yet to hear that it was evicted
    if not _has_fingerprint(run, message):
        text = (
            f"{site.label} offers no fingerprint of its data, and the run asks for data {run.settings.data!r}: give "
            f"atoll.join(data_fingerprint=...) {HASH_BYTES} bytes that are the same for the same data, or start a run "
            'with data = "local"'
        )
        run.refuse(stream, RefusedKind.DATA, text, message.data_fingerprint.hex())
        return
    if not manifests.is_the_runs(run, message):
        manifests.wait(run, stream, message)
        return
    if manifests.has_other_data(run, message):
        manifests.refuse_data(run, stream, site, message)
        return
    if not site.live and len(run.members.live()) >= run.settings.max_sites:
        text = (
            f"{site.label}: run {run.run_id!r} has as many sites as it takes (run.max_sites = {run.settings.max_sites})"
        )
        run.refuse(stream, RefusedKind.FULL, f"{text}: come back when one has left", "", str(run.settings.max_sites))
        return
    if not site.live and run.now < site.conduct.admitted_again_at:
        site.waits(message)  # `advance` admits it
        return
    site.waits(None)
    site.max_retained_bytes = message.max_retained_bytes
    site.bandwidth_bytes_per_s = message.bandwidth_bytes_per_s
    if site.live:
        _admit_again(run, site)
        return
    if not site.site_id:
        run.members.give_id(site)
    hello = site.hello
    assert hello is not None
    admitted_as, why = place(run, site, hello)
    site.admit(STANDING[admitted_as], run.now)
    run.log.forget(site.site_id)  # what it said of states before: it says it again
    run.persist(site.record())
    answer = states.admitted(run, site, admitted_as)
    level = logging.INFO
    if answer.state_hash:
        level = logging.ERROR
        site.num_wrong_states += 1
        run.num_wrong_states += 1
    run.report(level, f"admitted {site.label} at {site.address} as {admitted_as.name.lower()}: {why}")
    run.send(site, answer)
    if admitted_as is AdmittedAs.MEMBER:
        states.take(run, site, hello.last_commit, hello.state_hash)
        if not site.catching_up:  # else it asks for sources
            states.send_pending(run, site)


def advance(run: Run) -> None:
    """Offers that have waited for the manifest of the run, or for the time of sites that were evicted before."""
    for site in list(run.members.sites.values()):
        if site.waits_with is not None and site.stream is not None and run.now >= site.conduct.admitted_again_at:
            offer(run, site.stream, site, site.waits_with)
    for stream, message in manifests.advance(run):
        state = run.members.streams.get(stream)
        if state is not None and state.site is not None:
            offer(run, stream, state.site, message)


def _has_fingerprint(run: Run, message: m.Offer) -> bool:
    return run.settings.data == "local" or len(message.data_fingerprint) == HASH_BYTES


def _admit_again(run: Run, site: Site) -> None:
    """The same incarnation after a new stream, or with restarted workers: it goes on as what it is."""
    run.persist(site.record())
    (admitted_as,) = (kind for kind, standing in STANDING.items() if standing is site.standing)
    run.send(site, states.admitted(run, site, admitted_as))


def place(run: Run, site: Site, hello: m.Hello) -> tuple[AdmittedAs, str]:
    """What a site comes in as, and why."""
    log = run.log
    if hello.has_state:
        commit = hello.last_commit
        known = log.attested.get(commit, run.claim if commit == 0 else None)
        newer = [s for s in run.members.connected() if s.applied is not None and s.applied > commit]
        if known is None and commit < log.last and not log.after(commit) and newer:
            return AdmittedAs.JOINER, f"its state of commit {commit} is older than the log"
        # Its word counts as much as what is attested, unless it was found out.
        is_party = commit == log.last and site.site_id in log.contributors(commit) and not site.conduct.is_on_trial
        if known is None or known == hello.state_hash or is_party:
            return AdmittedAs.MEMBER, f"it holds commit {commit} of {log.last}"
        return AdmittedAs.JOINER, (
            f"its state of commit {commit} has hash {hello.state_hash.hex()[:12]}, the run's is {known.hex()[:12]}"
        )
    if states.needs_seeder(run) and states.may_seed(run, site):
        return AdmittedAs.SEEDER, "nobody holds a starting state yet"
    if hello.from_saved_model and not run.started:
        return AdmittedAs.JOINER, "another site makes the starting state; its saved model is not used"
    return AdmittedAs.JOINER, f"it fetches the state of commit {log.last}"
