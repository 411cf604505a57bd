"""A script says that it takes long before it joins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker import starting as starting_module
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import apply, in_memory


def test_it_is_announced_until_the_script_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    node = in_memory(monkeypatch, settings := RunSettings(run_id="r", steps=100))
    connection = node.connection(settings)
    monkeypatch.setattr(starting_module, "connect", lambda: connection)
    monkeypatch.setattr("atoll.node.worker.join.connect", lambda: connection)
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    atoll.starting("loading")
    atoll.starting("compiling", limit_s=7.0)
    net = nn.Linear(2, 1)
    with atoll.join(net, torch.optim.SGD(net.parameters(), lr=0.1)):
        pass
    said = [(what, body) for what, body in node.told if what in ("busy", "join")]
    assert [body for what, body in said if what == "busy"] == [
        {"what": "loading", "limit_s": 3600.0}, {"what": "compiling", "limit_s": 7.0}, {"what": "", "limit_s": 0.0},
    ]  # fmt: skip
    assert said[-1][0] == "join"


def test_without_a_node_it_is_nothing_and_without_sense_it_is_refused() -> None:
    atoll.starting("loading")
    with pytest.raises(ConfigError, match=r"say one, as atoll\.starting"):
        atoll.starting("")
    with pytest.raises(ConfigError, match="limit_s = inf"):
        atoll.starting("loading", limit_s=float("inf"))
