"""A run over again in one process, from the traces of its workers and the list of commits: what the values must be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.protocol.outer_settings import OuterSettings
from tests.workers.plain_worker import Model, arguments, parse_tensors

Array = npt.NDArray[np.float32]
Values = list[Array]
Event = dict[str, Any]


@dataclass
class ReplayedSite:
    """A site with one rank whose workers were never started again: what its trace says, trained over again."""

    events: list[Event]
    model: Model
    data_seed: int
    step: int = 0
    mode: str = ""
    version: int = 0
    snapshot: Values = field(default_factory=list)
    tokens: int = 0
    num_shifts: int = 0

    def train_to(self, step: int) -> None:
        while self.step < step:
            self.model.step(self.step, self.data_seed)
            self.step += 1

    def merge(self, version: int, outer: dict[int, Values]) -> None:
        for i, local in enumerate(self.model.values):
            new = outer[version][i]
            if self.mode == "REPLACE":
                self.model.set(i, new)
            elif self.mode == "MERGE":
                self.model.set(i, new + (local - self.snapshot[i]))
            else:
                self.model.set(i, (new - outer[self.version][i]) + local)
        self.num_shifts += self.mode == "SHIFT"
        self.version = version


class Replay:
    """`commits` as in the status of the coordinator: all of them, from the first on."""

    def __init__(self, traces: dict[str, Path], worker: list[str], seed: int, outer: OuterSettings) -> None:
        options = arguments(worker)
        self.sites: dict[str, ReplayedSite] = {}
        for name, path in traces.items():
            events = [json.loads(line) for line in path.read_text().splitlines()]
            model = Model(parse_tensors(options.tensors), options, seed, 0, 1)
            self.sites[name] = ReplayedSite(events[1:], model, events[0]["data_seed"])
        self._settings = outer
        first = Model(parse_tensors(options.tensors), options, seed, 0, 1).values
        self.outer: dict[int, Values] = {0: [v.copy() for v in first]}
        self._momentum = [np.zeros_like(v) for v in first]
        self.num_compared = 0

    def play(self, commits: list[dict[str, Any]]) -> None:
        """Raises AssertionError where a worker had other values than it must have."""
        for commit in commits:
            self._commit(commit)
        for site in self.sites.values():
            self._play(site, None)

    def _play(self, site: ReplayedSite, until: int | None) -> None:
        """Up to where the site takes commit `until` or a later one; None: to the end."""
        while site.events:
            event = site.events[0]
            kind = event["event"]
            if kind == "merged" and until is not None and event["version"] >= until:
                return
            del site.events[0]
            site.train_to(event["step"])
            if kind == "answer":
                site.mode = event["mode"]
            elif kind == "sealed":
                site.snapshot, site.tokens = [v.copy() for v in site.model.values], event["tokens"]
            elif kind == "merged":
                site.merge(event["version"], self.outer)
            if kind in ("sealed", "merged"):
                assert site.model.digest() == event["digest"], (kind, event)
                self.num_compared += 1

    def _commit(self, commit: dict[str, Any]) -> None:
        number = commit["commit"]
        contributors = [self.sites[name] for name in commit["contributors"]]
        for site in contributors:
            self._play(site, number)
        total = sum(site.tokens for site in contributors)
        assert total == commit["tokens"], f"commit {number}: weights cover all that was trained since the base"
        new: Values = []
        rate, momentum = np.float32(self._settings.learning_rate), np.float32(self._settings.momentum)
        for i, x in enumerate(self.outer[number - 1]):
            average = np.zeros_like(x)
            for site in contributors:
                average = average + np.float32(site.tokens / total) * (x - site.snapshot[i])
            self._momentum[i] = momentum * self._momentum[i] + average
            new.append(np.asarray(x - rate * (average + momentum * self._momentum[i]), np.float32))
        self.outer[number] = new
