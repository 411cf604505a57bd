"""The model of a run: an offer names it by its digest, and the manifest is asked for where that is not known.

Of one site at a time and in parts, so that whoever comes to the door takes neither memory nor the event loop.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.events import ManifestRead, ManifestRecord, ReadManifest
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sites.offers import Incoming
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.layout import Manifest, TensorSpec
from atoll.protocol.log_length import LogLength
from atoll.protocol.messages import RefusedKind
from atoll.protocol.text import byte_count

MAX_COMPARED_BYTES = 4 << 20
"""Of a manifest that is not the run's, which is asked for only to say what differs."""


def _part_limit_s(run: Run) -> float:
    """From one part of a manifest to the next."""
    return run.limits.lease_s + m.MANIFEST_PART_BYTES / run.limits.slowest_bytes_per_s


def fingerprint_of(run: Run, offer: m.Offer) -> bytes:
    """Of its data; empty where each site has its own."""
    return b"" if run.settings.data == "local" else offer.data_fingerprint


def is_the_runs(run: Run, offer: m.Offer) -> bool:
    """Whether the model that is offered is known to be the run's."""
    return run.manifest is not None and offer.manifest_digest == run.manifest.manifest.digest


def wait(run: Run, stream: int, offer: m.Offer) -> None:
    """Its manifest is asked for in its turn."""
    run.offers.waiting[stream] = offer


def other_data(run: Run, site: Site, offer: m.Offer) -> str:
    """How the data is not that of the sites before, which have the same model; empty if it is."""
    assert run.manifest is not None, "it is the run's"
    theirs, ours = fingerprint_of(run, offer), run.manifest.data_fingerprint
    if theirs == ours:
        return ""
    return (
        f"{site.label} has other data ({_short(theirs)}) than the sites before it ({_short(ours)}, data "
        f'{run.settings.data!r}): give it the same files, or start a run with data = "local"'
    )


def advance(run: Run) -> list[tuple[int, m.Offer]]:
    """Asks the next site for its manifest. Streams whose offers have become the run's own meanwhile are returned."""
    offers, streams = run.offers, run.members.streams
    incoming = offers.incoming
    if incoming is not None and incoming.stream not in streams:
        offers.incoming = None
    elif incoming is not None and incoming.until is not None and run.now >= incoming.until:
        offers.incoming = None
        text = f"the next part of its manifest did not come within {_part_limit_s(run):g} s"
        run.refuse(incoming.stream, RefusedKind.INVALID, text)
    known: list[tuple[int, m.Offer]] = []
    for stream, offer in list(offers.waiting.items()):
        if stream not in streams:
            del offers.waiting[stream]
        elif is_the_runs(run, offer):
            del offers.waiting[stream]
            known.append((stream, offer))
        elif offers.incoming is None:
            del offers.waiting[stream]
            offers.incoming = Incoming(stream=stream, offer=offer, until=run.now + _part_limit_s(run))
            run.send_on(stream, m.SendManifest())
    return known


def next_due(run: Run) -> float | None:
    """When the next part of a manifest must have come; None if none is awaited."""
    incoming = run.offers.incoming
    return None if incoming is None else incoming.until


def part(run: Run, stream: int, site: Site, message: m.ManifestPart) -> None:
    """The next bytes of the manifest that was asked for. Once it is whole it is read, away from the event loop."""
    incoming = run.offers.incoming
    if incoming is None or incoming.stream != stream or incoming.until is None:
        return  # nobody asked for it, or it is said again
    known = run.manifest.manifest if run.manifest is not None else None
    limit = m.MAX_MANIFEST_BYTES if known is None else MAX_COMPARED_BYTES
    if message.total_bytes > limit and known is not None:
        run.refuse(stream, *_no_model(run, site, incoming.offer, f"its manifest has {message.total_bytes} bytes"))
        return
    received, end = len(incoming.data), message.first_byte + len(message.data)
    if message.first_byte < received and end <= received:
        return  # said again
    problem = ""
    if not 0 < message.total_bytes <= limit:
        problem = f"a manifest of {message.total_bytes} bytes, at most {limit} are allowed"
    elif message.total_bytes != (incoming.total_bytes or message.total_bytes):
        problem = f"a manifest of {incoming.total_bytes} bytes and then of {message.total_bytes}"
    elif message.first_byte != received or end != min(received + m.MANIFEST_PART_BYTES, message.total_bytes):
        problem = f"bytes {message.first_byte} to {end} of its manifest, {received} of {message.total_bytes} are here"
    if problem:
        run.refuse(stream, RefusedKind.INVALID, f"{site.label} sent {problem}")
        return
    incoming.total_bytes = message.total_bytes
    incoming.data += message.data
    incoming.until = run.now + _part_limit_s(run)
    if len(incoming.data) == incoming.total_bytes:
        incoming.until, data, incoming.data = None, bytes(incoming.data), bytearray()
        run.put_out(ReadManifest(stream=stream, data=data, settings=run.settings, known=known))


def read(asked: ReadManifest) -> ManifestRead:
    """Pure, and slow for a large model."""
    try:
        limit = None if asked.known is None else 2 * len(asked.known.tensors) + 64
        manifest = wire.decode_manifest(asked.data, limit)
        if asked.known is not None:
            return ManifestRead(stream=asked.stream, manifest=manifest, problem=first_difference(manifest, asked.known))
        if not manifest.num_trainable:
            raise ConfigError("the model has no trainable parameters")
        chunk_sizes = ChunkSizes.of(manifest, asked.settings.sync)
        length = LogLength(manifest, asked.settings.sync)
        _ = manifest.digest, manifest.buffer_bytes  # they are kept with it
    except AtollError as error:
        return ManifestRead(stream=asked.stream, problem=str(error))
    except Exception as error:  # whatever a site has made of it: while nothing answers, nobody else can offer a model
        return ManifestRead(stream=asked.stream, problem=repr(error), fault=error)
    return ManifestRead(stream=asked.stream, manifest=manifest, chunk_sizes=chunk_sizes, log_length=length)


def taken(run: Run, event: ManifestRead) -> None:
    """The manifest has been read: it is the run's from now on, or its site is refused."""
    incoming = run.offers.incoming
    if incoming is None or incoming.stream != event.stream:
        return
    run.offers.incoming = None
    stream = run.members.streams.get(event.stream)
    site = stream.site if stream is not None else None
    if site is None:
        return
    offer = incoming.offer
    if run.manifest is not None or event.problem or event.manifest is None or event.log_length is None:
        run.refuse(event.stream, *_no_model(run, site, offer, event.problem))
    elif event.manifest.digest != offer.manifest_digest:
        text = f"{site.label} sent another manifest than the one it offered: {event.manifest.digest.hex()[:12]}, not "
        run.refuse(event.stream, RefusedKind.INVALID, text + _short(offer.manifest_digest))
    else:
        record = ManifestRecord(manifest=event.manifest, data_fingerprint=fingerprint_of(run, offer))
        run.set_manifest(record, event.chunk_sizes, event.log_length)
        run.persist(record)
        run.report(
            logging.INFO,
            f"the run's model has {record.manifest.num_trainable} trainable parameters in "
            f"{len(record.manifest.tensors)} tensors, {len(run.chunk_sizes)} chunks "
            f"{f'in {num} fragments' if (num := run.settings.sync.fragments) > 1 else 'a sync'}"
            f"{_logs_in_words(run, event.log_length)}",
        )
        run.offers.waiting = {event.stream: offer} | run.offers.waiting  # it came first


def _logs_in_words(run: Run, length: LogLength) -> str:
    """Where their length follows from the model."""
    if not length.counts_bytes:
        return ""
    return (
        f"; payload logs have at most {byte_count(length.most_bytes(run.settings.min_sites, run.settings.max_sites))}"
    )


def _no_model(run: Run, site: Site, offer: m.Offer, what: str) -> Refusal:
    """The manifest cannot be that of the run, which has `what` or which it differs from in that."""
    if run.manifest is None:
        return RefusedKind.MANIFEST, f"{site.label}: {what}"
    return RefusedKind.MANIFEST, (
        f"{site.label} has another model ({_short(offer.manifest_digest)}) than run {run.run_id!r} "
        f"({_short(run.manifest.manifest.digest)}): {what}; use the other sites' script and settings"
    )


def first_difference(theirs: Manifest, ours: Manifest) -> str:
    """In words: the first tensor that is not the same in both."""
    theirs_by_name = {t.name: t for t in theirs.tensors}
    ours_by_name = {t.name: t for t in ours.tensors}
    for name in sorted({*theirs_by_name, *ours_by_name}, key=str.encode):
        a, b = theirs_by_name.get(name), ours_by_name.get(name)
        if a is None:
            return f"it lacks {name!r}, which the run has as {_words(b)}"
        if b is None:
            return f"it has {name!r} ({_words(a)}), which the run lacks"
        if a != b:
            return f"{name!r} is {_words(a)} there and {_words(b)} in the run"
    return f"tied weights differ: {len(theirs.tied)} there, {len(ours.tied)} in the run"


def _short(digest: bytes) -> str:
    return digest.hex()[:12]


def _words(spec: TensorSpec | None) -> str:
    assert spec is not None
    shape = "x".join(str(n) for n in spec.shape) or "a scalar"
    return f"{shape} {spec.dtype} {spec.role.name.lower()}"
