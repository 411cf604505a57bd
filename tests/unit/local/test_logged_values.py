"""What ranks log, at their node: to the journal all of it, to the coordinator with heartbeats, bounded."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.node.daemon.journal import Journal
from atoll.node.daemon.logged_values import LoggedValues
from atoll.protocol.logged import MAX_LOGGED, MAX_NAMES, Logged, LoggedValue


def test_all_is_in_the_journal_and_the_newest_of_each_curve_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    logged = LoggedValues(journal)
    said: list[Logged] = []
    logged.is_wanted = True
    outer = LoggedValue(name="val_loss", step=4, value=2.0, of_outer=True)
    own = LoggedValue(name="val_loss", step=5, value=2.5)
    logged.heard(1, Logged(values=(outer, own, LoggedValue(name="no name\n", step=5, value=0.0))))
    logged.beat(said.append)
    logged.beat(said.append)
    assert said == [Logged(values=(outer, own))]

    many = [LoggedValue(name="n", step=step, value=float(step)) for step in range(MAX_LOGGED)]
    logged.heard(0, Logged(values=tuple(many)))
    logged.heard(0, Logged(values=(own,)))
    logged.beat(said.append)
    assert said[1:] == [Logged(values=(many[-1], own))]
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [len(line["values"]) for line in lines] == [2, MAX_LOGGED, 1]
    assert {k: v for k, v in lines[0].items() if k != "time_s"} == {
        "kind": "logged",
        "rank": 1,
        "values": [
            {"name": "val_loss", "step": 4, "value": 2.0, "of_outer": True},
            {"name": "val_loss", "step": 5, "value": 2.5},
        ],
    }
    journal.close()


def test_a_script_that_speaks_to_the_socket_itself_has_no_more_names(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    logged = LoggedValues(journal)
    said: list[Logged] = []
    logged.beat(said.append)
    for i in range(2 * MAX_NAMES):
        logged.heard(0, Logged(values=(LoggedValue(name=f"n{i}", step=1, value=0.0),)))
    logged.beat(said.append)
    assert not said, "a coordinator of an older version"
    logged.is_wanted = True
    logged.beat(said.append)
    assert [value.name for value in said[0].values] == [f"n{i}" for i in range(MAX_NAMES)]
    journal.close()
