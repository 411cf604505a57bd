"""The coordinator's core hears any messages in any order from several streams, among those of sites that behave.

After every event the story checks that decisions were kept before they were sent. A refused message must have changed
nothing but its stream: the core is compared with a copy of it that only saw that stream end.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import forgetting
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from tests.harness.coordinator_questions import decisions
from tests.harness.coordinator_story import Story, a_hash, a_manifest, some_settings, three_layers
from tests.harness.fuzzing import SITE_MESSAGES, SMALL, fuzz, instances

NAMES = ("a", "b", "c")
STATES = {bytes(32): "other", **{a_hash(f"s{n}"): f"s{n}" for n in range(4)}}
HASHES = st.sampled_from([b"", *STATES, b"\1" * 31])
MODELS = st.sampled_from([a_manifest().digest, a_manifest(7).digest, three_layers().digest, bytes(32)])
PARTS = st.sampled_from([b"", b"x", wire.encode(a_manifest()), wire.encode(a_manifest(7)), bytes(100)])
MESSAGES = st.one_of(
    [instances(cls) for cls in SITE_MESSAGES]
    + [
        instances(
            m.Hello,
            name=st.sampled_from([*NAMES, "", "d"]),
            key=st.sampled_from([a_hash("key a"), bytes(32)]),
            address=st.sampled_from(["a:1", "d:2", "nowhere"]),
        )
        | instances(m.Hello, state_hash=HASHES),
        instances(m.Applied, commit=SMALL, state_hash=HASHES),
        instances(m.Done, sync=SMALL, attempt=SMALL, term=SMALL, last_commit=SMALL, state_hash=HASHES),
        instances(
            m.Products,
            sync=SMALL,
            attempt=SMALL,
            term=SMALL,
            products=st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e99, 1e300]), max_size=6).map(tuple)
            | st.sampled_from([(1.0,), (1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.0, 0.0, 4.0)]),
        ),
        instances(m.ExchangeFailed, sync=SMALL, attempt=SMALL, term=SMALL, peer_site_id=SMALL),
        instances(
            m.ExchangeFailed,
            sync=SMALL,
            attempt=SMALL,
            term=SMALL,
            tensor=st.just("w"),
            outliers=st.lists(instances(m.Outlier, site_id=SMALL), max_size=4).map(tuple),
        ),
        instances(m.Ready, sync=SMALL),
        instances(m.CommitRebuilt, commit=SMALL, state_hash=HASHES),
        instances(m.Offer, manifest_digest=MODELS, data_fingerprint=st.just(a_hash("data"))),
        st.builds(m.ManifestPart, first_byte=SMALL, total_bytes=st.sampled_from([0, 1, 39, 1 << 63]), data=PARTS),
    ]
)
HEADERS = instances(m.Header, protocol_version=st.just(PROTOCOL_VERSION), run_id=st.sampled_from(["", "run", "other"]))


class World:
    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        quorum, fragments = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 1, 2, 3]))
        overlap = data.draw(st.sampled_from([0, 0, 3, 10]))
        settings = some_settings(min_sites=2, quorum=quorum, fragments=fragments, overlap=overlap)
        self.story = Story(settings, manifest=three_layers() if fragments > 1 else None)

    def draw(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def stream(self) -> int:
        streams = self.story.streams()
        return int(self.draw(*streams, 99)) if streams else 99

    # --- what behaves

    def behave(self) -> None:
        """A site does what is due."""
        story, name = self.story, self.draw(*NAMES)
        site, last = story.sites.get(name), story.last_commit()
        if site is None or site.stream is None:
            state = self.draw(None, None, (last, f"s{last}"))
            story.connect(name, incarnation=(site.incarnation if site else 1) + self.draw(0, 0, 1), state=state)
            return
        if story.stream_of(name) != site.stream:
            return
        holds, opened = story.holds(name), story.open_syncs()
        fragment = self.draw(*(o.fragment for o in opened)) if opened else None
        if not story.is_live(name):
            story.offer(name)
        elif holds is None or holds < last:
            story.applied(name, last, f"s{last}")
        elif story.is_planned(name, fragment):
            story.done(name, f"s{last}", plan=story.plan(fragment), commit=last)
        elif self.draw(False, False, True):
            story.says(name, m.LeaseRequest(num_samples=40, wanted=self.draw(0, 7, 100)))
        elif opened:
            leased = [story.leased_by(name, line) for line in range(len(story.lines()))]
            story.ready(
                name, tokens=self.draw(0, 100), data=[r for ranges in leased for r in ranges][:1], fragment=fragment
            )

    # --- what does not

    def say_anything(self) -> None:
        message = self.data.draw(MESSAGES)
        stream = self.stream()
        name = self.story.site_on(stream)
        if name and self.draw(True, True, False):
            header = m.Header(
                protocol_version=PROTOCOL_VERSION,
                run_id="run",
                site_id=self.story.id_of(name),
                incarnation=self.story.incarnation_of(name),
            )
        else:
            header = self.data.draw(HEADERS)
        try:  # as it comes through the door
            header, message = wire.unpack(wire.request(message, header, 1, 0))
        except InvalidMessage as error:
            self.refused_changes_nothing(stream, e.Malformed(stream, str(error)))
            return
        self.refused_changes_nothing(stream, e.Received(stream, header, message, self.draw(0, 1, 1 << 63)))

    def refused_changes_nothing(self, stream: int, event: e.Event) -> None:
        without = copy.deepcopy(self.story.core)
        existed = stream in self.story.streams()
        outputs = self.story.happens(event)
        refused = isinstance(event, e.Garbled) or any(
            isinstance(o, e.Send) and o.stream == stream and isinstance(o.message, m.Refused) for o in outputs
        )
        if refused or not existed:
            without.handle([e.StreamClosed(stream, "refused")], self.story.now, self.story.wall_s)
            assert decisions(self.story.core) == decisions(without)

    def ask(self) -> None:
        """An operator wants something, whatever is under way."""
        story, name = self.story, self.draw(*NAMES, "nobody")
        match self.data.draw(st.integers(0, 5)):
            case 0:
                story.ask_to_go_back(self.draw(-1, 0, 1, 2))
            case 1:
                story.happens(e.RollbackAsked("atoll rollback"))
            case 2:
                (story.ban if self.draw(False, True) else story.evict)(name)
            case 3 | 4:
                story.lift_ban(name)
            case _:
                problem = story.reset()
                assert bool(problem) == story.view.started or story.view.finished

    def step(self) -> None:
        story = self.story
        match self.data.draw(st.integers(0, 20)):
            case 0:
                story.restart()
            case 1:
                story.drop(self.draw(*story.sites)) if story.sites else None
            case 2:
                story.open_stream(self.draw("a", "b", "x"))
            case 3:
                story.wait(self.draw(0.3, 1.5, 4.0))
            case 4:
                kind = self.draw(e.Malformed, e.Garbled)
                self.refused_changes_nothing(stream := self.stream(), kind(stream, "noise"))
            case 5 if self.draw(False, False, True):
                story.happens(e.StopAsked("stop"))
            case 6 if self.draw(False, True):
                self.ask()
            case n if n < 10:
                self.behave()
            case _:
                self.say_anything()


@fuzz(120)
@given(st.data())
def test_no_message_crashes_it_and_a_refused_one_changes_nothing(data: st.DataObject) -> None:
    kept = data.draw(st.sampled_from([0, forgetting.KEPT_GONE]))  # none, as where many come and go
    with patch.multiple(forgetting, KEPT_GONE=kept, KEPT_STRUCK=kept):
        schedule(data)


def schedule(data: st.DataObject) -> None:
    world = World(data)
    stage = data.draw(st.sampled_from(["empty", "training", "planned", "second sync", "second sync planned"]))
    if stage != "empty":
        world.story.start("a", "b")
    if stage.startswith("second"):
        world.story.commit_one("a", "b", state="s0", following="s1")
    if stage.endswith("planned"):
        world.story.ready("a")
        world.story.ready("b")
    for _ in range(data.draw(st.integers(5, 40))):
        world.step()
    story = world.story
    assert all(len(h) == 32 for h in story.attestations().values())
    for name in story.live_sites():  # whoever counts as connected has a stream of its own
        stream = story.stream_of(name)
        assert stream is None or story.site_on(stream) == name
