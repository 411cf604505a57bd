"""The in-flight vectors of docs/protocol.md, taken by what a site runs: its core says when ranks train, write snapshots
and take updates, and how; its data plane averages and updates; its workers merge. Two sites do all alike."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, Values
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.publish import publish_replace, seed_from_snapshot
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.tensors import find_tensors
from atoll.protocol import messages as m
from atoll.protocol.history import History
from atoll.protocol.layout import Layout
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import validate
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.fake_node import FakeNode
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, plan

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
VECTORS: list[dict[str, Any]] = json.loads(re.findall(r"```json in-flight-vector\n(.*?)```", PAGE.read_text(), re.S)[0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


class Model(nn.Module):
    """One number a fragment."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))


class Ranks:
    """Of one site: its model beside the buffers that it shares with its node."""

    def __init__(self, gains: list[float], sync: SyncSettings) -> None:
        self.gains = gains
        model = Model(len(gains))
        self.values = [value.detach() for value in model.parameters()]
        tensors = find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)], {})
        self.node = FakeNode(manifest=tensors.manifest)
        self.shared = SharedTensors(tensors, self.node.joined(len(tensors.pieces)), sync)
        self.manifest = tensors.manifest

    @torch.no_grad()
    def train(self, num_steps: int) -> None:
        for value, gain in zip(self.values, self.gains, strict=True):
            value.add_(gain * num_steps)


class Course(Driver):
    """A run in which each commit comes when the ranks may train no further without it."""

    def __init__(self, vector: dict[str, Any], folder: Path) -> None:
        alpha = vector["alpha"]
        self.sync = SyncSettings(
            every=vector["every"],
            fragments=vector["fragments"],
            overlap_steps=vector["overlap_steps"],
            merge="mix" if alpha else "keep",
            alpha=alpha,
            codec="fp32",
        )
        outer = OuterSettings(learning_rate=vector["rate"], momentum=vector["momentum"])
        settings = dataclasses.replace(SETTINGS, steps=vector["steps"], sync=self.sync, outer=outer)
        validate(settings)
        super().__init__(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0), settings=settings)
        self.steps = vector["steps"]
        self.sites = [Ranks(gains, self.sync) for gains in vector["gains"]]
        layout = Layout(self.sites[0].manifest, num_fragments=self.sync.fragments)
        self.optimizer = OuterOptimizer(settings)
        self.outer = OuterState.create(folder, layout, self.optimizer.slots, "run")
        self.records: list[m.Commit] = []
        self.outer.history = lambda: History([0] * self.sync.fragments, (r.fragment for r in self.records))
        seed_from_snapshot(self.outer, self.sites[0].node.snapshot)
        boundaries = sorted((row[1], row[0]) for row in vector["taken"])
        self.windows = deque((fragment, boundary) for boundary, fragment in boundaries)
        self.step = self.seq = self.num_opened = self.num_commits = self.boundary = 0
        self.opened: deque[tuple[int, int]] = deque()  # fragment and boundary
        self.committed = (0, 0)
        self.found: list[list[Any]] = []

    def open_next(self) -> m.Open:
        fragment, boundary = self.windows.popleft()
        self.num_opened += 1
        self.opened.append((fragment, boundary))
        before, self.boundary = self.boundary, boundary
        return m.Open(
            sync=self.num_opened,
            fragment=fragment,
            base_commit=self.num_commits,
            run_step=before,
            run_tokens=0,
            num_steps=boundary - before,
            overlap_steps=min(self.sync.overlap_steps, self.steps - boundary),
        )

    def may_open_beside(self) -> bool:
        """A sync of all fragments is alone."""
        if not self.windows or self.windows[0][0] == self.sync.fragments:
            return False
        return len(self.opened) < self.sync.most_in_flight

    def run(self) -> list[list[Any]]:
        self.up_to_admitted(m.AdmittedAs.MEMBER)
        self.receive(self.open_next())
        while True:
            self.seq += 1
            self.ask(self.step, self.seq)
            while not any(isinstance(output, out.AnswerWorkers) for output in self.out):
                if any(isinstance(output, out.PublishState) for output in self.out):
                    self.publish()
                else:
                    self.commit_the_oldest()
            answer = self.answer()
            if answer.kind is AnswerKind.STOP:
                return self.found
            self.follow(answer)

    def follow(self, answer: e.Answer) -> None:
        match answer.kind:
            case AnswerKind.SNAPSHOT:
                assert (answer.fragment, self.step) == self.opened[-1]
                for site in self.sites:
                    site.shared.write_snapshot(answer.fragment, with_frozen=False)
                self.sealed(self.step, num_steps=1)
                if self.may_open_beside():
                    self.receive(self.open_next())
                return
            case AnswerKind.APPLY:
                for site in self.sites:
                    site.shared.apply(answer.fragment, answer.mode, fresh=answer.fresh)
                self.merged(answer.version)
                self.note(answer)
        for site in self.sites:
            site.train(answer.next_step - self.step)
        self.step = answer.next_step

    def publish(self) -> None:
        wanted = self.wants(out.PublishState)
        assert isinstance(wanted, out.PublishState)
        assert isinstance(wanted.content, Values), "nobody is late"
        for site in self.sites:
            publish_replace(self.outer, site.node.publish, self.outer.layout.fragments[wanted.content.fragment], None)
        self(e.Published(wanted.content))

    def commit_the_oldest(self) -> None:
        fragment, boundary = self.committed = self.opened.popleft()
        sync = self.num_opened - len(self.opened)
        self.num_commits += 1
        self.receive(replace(plan(sync, base=self.num_commits - 1), fragment=fragment))
        exchanged(self, sync)
        record = replace(commit(self.num_commits, sync, final=boundary == self.steps), fragment=fragment, next=None)
        self.update(record)
        is_followed = bool(self.windows) and not self.opened
        self.receive(replace(record, next=self.open_next()) if is_followed else record)
        self(e.CommitApplied(commit=record.commit, state_hash=HASH))
        answered = self.out
        if not is_followed and self.may_open_beside():
            self.receive(self.open_next())
            self.out = [*answered, *self.out]

    def update(self, record: m.Commit) -> None:
        self.records.append(record)
        travels = spec_of(self.sync, record.commit, record.fragment)
        names = dict.fromkeys([spec.name for spec in self.outer.layout.manifest.tensors], "F32")
        data = [
            SyncData(self.outer.layout, travels, self.outer, site.node.snapshot, names, fragment=record.fragment)
            for site in self.sites
        ]
        payloads = {
            chunk: data[0].reduce(chunk, [(5, d.contribution(chunk)) for d in data]) for chunk in data[0].chunks
        }
        for chunk, payload in payloads.items():
            self.outer.apply(chunk, payload, self.optimizer.at(record))

    def note(self, taken: e.Answer) -> None:
        """Of the last fragment that a commit brings."""
        fragment, boundary = self.committed
        num = self.sync.fragments
        if taken.version == 0 or taken.fragment != min(fragment, num - 1):
            return
        ours = range(num) if fragment == num else (fragment,)
        chunks = [self.outer.read(self.outer.layout.fragments[each][0]).data for each in ours]
        outer = [float(torch.frombuffer(bytearray(data[:4]), dtype=torch.float32)) for data in chunks]
        locals_ = [[float(site.values[each]) for each in ours] for site in self.sites]
        self.found.append([fragment, boundary, self.step, outer, locals_])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['fragments']}-{v['overlap_steps']}-{v['alpha']}")
def test_a_site_takes_what_the_vectors_say_when_they_say_it(vector: dict[str, Any], tmp_path: Path) -> None:
    course = Course(vector, tmp_path)
    assert course.run() == vector["taken"]
