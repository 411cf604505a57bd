"""What a script logs: from `site.log` to the node, together, bounded, and as what it is of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.logged_values import LoggedValues
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError
from atoll.protocol.logged import MAX_LOGGED, MAX_NAMES, LoggedValue
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import apply, in_memory


def test_what_is_logged_within_the_outer_parameters_is_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=100))
    net = nn.Linear(2, 1, bias=False)
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True))]
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with atoll.join(net, optimizer) as site:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        site.step(tokens=1)
        site.log({"val_loss": torch.tensor(2.5)})
        with site.outer_parameters():
            site.log({"val_loss": 2.25})
        site.log({"lr": 1})
        assert node.said("logged") == [], "not a message each"
    assert node.said("logged") == [
        {
            "values": (
                LoggedValue(name="val_loss", step=41, value=2.5),
                LoggedValue(name="val_loss", step=40, value=2.25, of_outer=True),
                LoggedValue(name="lr", step=41, value=1.0),
            )
        }
    ]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"a b": 1.0}, "a name is"),
        ({"": 1.0}, "a name is"),
        ({"x" * 65: 1.0}, "a name is"),
        ({3: 1.0}, "3"),
        ({"a": "much"}, "no number"),
        ({"a": torch.zeros(2)}, "no number"),
        ({"a": None}, "no number"),
        ({"a": 10**400}, "no number"),
    ],
)
def test_what_is_no_name_or_no_number_is_an_error_also_of_a_script_alone(values: object, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Site().log(values)  # type: ignore[arg-type]


def test_a_full_message_goes_at_once_and_what_is_left_out_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[tuple[LoggedValue, ...]] = []
    logged = LoggedValues(said.append)
    for step in range(2):
        logged.log({"loss": math.nan, "norm": math.inf}, step, of_outer=False)
        logged.log({f"n{i}": i for i in range(MAX_NAMES + 2)}, step, of_outer=False)
    assert capsys.readouterr().err.splitlines() == [
        "atoll: site.log leaves out loss where it is nan, first at step 0",
        "atoll: site.log leaves out norm where it is inf, first at step 0",
        f"atoll: site.log keeps the first {MAX_NAMES} names, and 'n{MAX_NAMES}' is one more",
    ]
    assert not said
    for step in range(2, 2 + MAX_LOGGED):
        logged.log({"n0": step}, step, of_outer=True)
    assert [len(values) for values in said] == [MAX_LOGGED]
    logged.flush()
    assert [len(values) for values in said] == [MAX_LOGGED, 2 * MAX_NAMES]
    logged.flush()
    assert len(said) == 2
