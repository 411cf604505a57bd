"""What `status`, `top`, `events` and `plot` make of a run."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atoll.cli import figures, plot, status
from atoll.cli.events import News
from atoll.cli.looks import AWAY_LIMIT_S
from atoll.cli.main import main
from atoll.cli.top import picture
from atoll.coordinator.core.curves import SENT_BYTES, TRAINING_LOSS
from atoll.coordinator.core.records import CurveRecord
from atoll.coordinator.happenings import KEPT, MAX_CHARACTERS, Happenings
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol.errors import ConfigError, HostError, PeerError, StateError
from tests.unit.cli.test_demo_watch import commit, document, site
from tests.unit.coordinator.test_store_contract import SETTINGS, a_commit, a_site

SPAN = {
    "sync": 7, "opened_s": 100.0, "ready_s": 104.0, "ended_s": 105.5, "attested_s": 106.0, "attempts": 2, "commit": 6,
}  # fmt: skip
LOGGED = [
    {"name": "val_loss", "of_outer": True, "step": 40, "value": 2.25},
    {"name": "lr", "of_outer": False, "step": 41, "value": 1e-3},
]


def a_document(**changes: Any) -> dict[str, Any]:
    commits = [commit(n, time=1000.0 + 10 * n) for n in (1, 2, 3)]
    happened = [{"number": 1, "time_s": 1000.0, "level": "warning", "text": "evicted b (site 2): \x1b[31msilent"}]
    losses = [[n, 20 * n, 5 * n, 8.0 / n] for n in range(1, 9)]
    sites = [site("a", logged=LOGGED), site("gone", state_kind="gone", logged=LOGGED)]
    given = {
        "commits": commits,
        "timeline": [SPAN],
        "events": happened,
        "losses": losses,
        "sites": sites,
        "run_step": 60,
    }
    return document(**(given | changes))


def test_how_fast_a_run_is_and_how_long_it_takes() -> None:
    assert figures.pace(a_document()) == figures.Pace(tokens_per_s=0.5, steps_per_s=2.0, left_s=120.0)
    by_tokens = a_document(steps=0, tokens=20, run_tokens=15)
    assert figures.pace(by_tokens) == figures.Pace(tokens_per_s=0.5, steps_per_s=2.0, left_s=10.0)
    assert figures.pace(a_document(finished=True)) == figures.Pace(0.5, 2.0, None)
    assert figures.pace(a_document(commits=[commit(1, time=3.0), commit(2)])) is None, "of one commit"
    assert figures.pace(a_document(commits=[commit(1, time=3.0), commit(2, time=2.0)])) is None, (
        "the clock was set back"
    )


def test_lines_below_the_table() -> None:
    assert figures.lines(a_document()) == [
        "0 tokens/s, 2.00 steps/s, 2 min 0 s left",
        "sync 7: trained 4.0 s, exchanged 1.5 s, applied 0.5 s, attempt 2",
        "loss █▄▂▂▁▁▁▁ 8.000 to 1.000",
        "val_loss 2.25 at step 40, a, of the outer parameters",
        "lr 0.001 at step 41, a",
    ]
    assert figures.lines(document(losses=[])) == [], "a coordinator of an older version"


def test_what_sites_say_of_a_sync_and_what_is_wrong_with_a_tracker_are_lines_of_their_own() -> None:
    said = {"train": 4.0, "snapshot": 0.25, "exchange": 1.5, "apply": 0.5, "wait": 2.0}
    newer = SPAN | {"sync": 8, "commit": 7, "phases": None}
    trackers = [{"name": "wandb", "problem": "OSError: away\x1b[31m"}, {"name": "mlflow", "problem": ""}]
    found = figures.lines(a_document(timeline=[SPAN | {"phases": said}, newer], trackers=trackers))
    assert found[1] == "sync 7: trained 4.0 s, snapshot 0.2 s, exchanged 1.5 s, applied 0.5 s, waited 2.0 s, attempt 2"
    assert found[3] == "wandb is not told of the run, which goes on: OSError: away\\x1b[31m"
    assert not any("mlflow" in line for line in found)


def test_what_sites_said_of_an_old_sync_is_not_shown_as_that_of_the_last_one() -> None:
    """Nobody has said anything of the newer one, as sites of an older version, or none that takes commits any more."""
    said = SPAN | {"phases": {"train": 4.0, "exchange": 1.5}}
    of_sites = "sync 7: trained 4.0 s, exchanged 1.5 s, attempt 2"
    for ended_s, shown in ((135.5, of_sites), (135.6, "sync 8: trained 9.0 s, exchanged 20.6 s")):
        newer = {"sync": 8, "opened_s": 106.0, "ready_s": 115.0, "ended_s": ended_s, "attested_s": None, "attempts": 1}
        timeline = [said, newer | {"commit": 7, "phases": None}, newer | {"sync": 9, "commit": None, "ended_s": None}]
        assert figures.last_sync(a_document(timeline=timeline)).startswith(shown)


def test_nobody_is_asked_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The run may be over, and its coordinator gone for good. An answer in between begins the wait anew."""
    now_s, answers = 0.0, (0.0, 1200.0)

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 600.0

    def look() -> dict[str, Any]:
        if now_s not in answers:
            raise HostError("no coordinator here")
        return a_document()

    monkeypatch.setattr("atoll.cli.looks.time.sleep", sleep)
    monkeypatch.setattr("atoll.cli.looks.time.monotonic", lambda: now_s)
    monkeypatch.setattr(status, "source", lambda args, **asked: look)
    assert main(["status", "--watch"]) == PeerError.exit_code
    assert now_s == 1200.0 + AWAY_LIMIT_S
    assert "nobody has answered for 30 min 0 s, so this look ends: no coordinator here" in capsys.readouterr().err


def test_a_restart_of_the_coordinator_ends_no_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> dict[str, Any]:
        raise HostError("no coordinator here\n")

    def as_json(number: int, term: int, **changes: Any) -> dict[str, Any]:
        happened = [{"number": number, "time_s": 1000.0, "level": "info", "text": f"commit {number} of term {term}"}]
        return a_document(events=happened, term=term, **changes)

    for command, said in (
        (["events", "--follow"], ["commit 1 of term 1", "commit 2 of term 2"]),
        (["status", "--watch"], ["run r: training", "run r: training"]),
    ):
        monkeypatch.setattr("atoll.cli.looks.time.sleep", lambda s: None)
        answers = iter((as_json(1, 1), None, None, as_json(2, 2, finished=True)))

        def look(answers: Iterator[dict[str, Any] | None] = answers) -> dict[str, Any]:
            return next(answers) or away()

        monkeypatch.setattr(status, "source", lambda args, look=look, **asked: look)
        assert main(command) == 0
        found = capsys.readouterr()
        lines = [line for line in found.out.splitlines() if any(words in line for words in said)]
        assert [words for words, line in zip(said, lines, strict=True) if words in line] == said
        assert found.err.count("no coordinator here") == 1, "said once"
    monkeypatch.setattr(status, "source", lambda args, **asked: away)
    assert main(["events", "--follow"]) == HostError.exit_code, "where nobody answered, nothing is followed"


def test_the_whole_terminal_says_that_it_is_of_before() -> None:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(picture(a_document(), 120, "no coordinator\nanswers"))
    assert out.getvalue().startswith("answers")
    assert "run r: training" in out.getvalue()


def test_a_sparkline_has_a_character_for_each_part_and_leaves_out_what_is_no_number() -> None:
    assert figures.sparkline([1.0, math.nan, 2.0, math.inf]) == "▁█"
    assert figures.sparkline([]) == ""
    assert figures.sparkline([3.0, 3.0]) == "▁▁"
    assert figures.sparkline(list(range(100)), width=4) == "▁▃▆█"


def test_the_whole_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=False)
    console.print(picture(a_document(), 120))
    text = out.getvalue()
    assert "run r: training" in text
    assert "val_loss 2.25" in text
    assert any(line.startswith("0 tokens/s") for line in text.splitlines()), "below the bar"
    assert "warning  evicted b (site 2): \\x1b[31msilent" in text, "nothing steers the terminal"


def test_only_news_is_said_and_what_was_missed_too() -> None:
    news = News()
    assert len(news.lines(a_document(), in_json=True)) == 1
    assert news.lines(a_document(), in_json=True) == []
    later = [{"number": n, "time_s": 1000.0 + n, "level": "info", "text": f"commit {n}"} for n in (5, 6)]
    said = news.lines(a_document(events=later), in_json=False)
    assert said[0] == "(3 before these are in the coordinator's log)"
    assert said[1].endswith("info     commit 5")
    again = news.lines(a_document(events=later[:1], term=2), in_json=True)
    assert [json.loads(line) for line in again] == later[:1], "another start of the coordinator"


def test_events_for_programs_are_an_object_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    happened = [{"number": n, "time_s": 1000.0 + n, "level": "info", "text": f"\x1b[31m{n}\n"} for n in (4, 5)]
    monkeypatch.setattr(status, "source", lambda args, **asked: lambda: a_document(events=happened))
    assert main(["events", "--format", "json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == happened, "and not how many are missing before them"
    assert not any("\x1b" in line for line in lines)


def test_what_happens_is_bounded_and_debug_lines_are_no_news() -> None:
    happenings = Happenings()
    for n in range(KEPT + 10):
        happenings.note(10 if n % 2 else 20, "x" * 2 * MAX_CHARACTERS + "\n", 1.0)
    found = happenings.document()
    assert [one["number"] for one in found] == list(range(1, KEPT // 2 + 6))
    assert {len(str(one["text"])) for one in found} == {MAX_CHARACTERS}
    for _ in range(KEPT):
        happenings.note(30, "y", 1.0)
    assert len(happenings.document()) == KEPT


def a_store(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    store.begin(SETTINGS)
    points = ((10, 5, 1.0, 2.0), (20, 10, 2.0, 1.5))
    curves = [
        CurveRecord(site_id=1, name=name, of_outer=of_outer, stride=1, points=points)
        for name, of_outer in ((TRAINING_LOSS, False), (SENT_BYTES, False), ("val_loss", True))
    ]
    store.persist(1, (a_site(1), a_commit(1), *curves), 1.0)
    return store


def test_a_store_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    a_store(path).close()
    parts = {part.title: part.lines for part in plot.read(path)}
    assert parts["training loss"].keys() == {"the run", "s1"}
    assert parts["val_loss"] == {"s1, of the outer parameters": ([10, 20], [2.0, 1.5])}
    assert parts["bytes sent, since its node started"]["s1"] == ([10, 20], [2.0, 1.5])
    for name, begins in (("run.png", b"\x89PNG"), ("run.svg", b"<?xml")):
        assert main(["plot", str(path), "-o", str(tmp_path / name), "--log"]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_what_cannot_be_drawn_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    store = a_store(path)
    with pytest.raises(HostError, match="atoll backup"):
        plot.read(path)
    store.close()
    with pytest.raises(HostError, match="no such file"):
        plot.read(tmp_path / "other.db")
    (tmp_path / "text.db").write_text("no database at all" * 100)
    with pytest.raises(StateError, match="no store"):
        plot.read(tmp_path / "text.db")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert main(["plot", str(tmp_path / "text.db"), "-o", "run.png"]) == StateError.exit_code
    assert "no store" in capsys.readouterr().err
    assert main(["plot", str(path), "-o", "run.png"]) == ConfigError.exit_code
    assert "needs matplotlib" in capsys.readouterr().err
    assert main(["plot", str(path), "-o", "run.gif"]) != 0
    assert ".png, .pdf, .svg" in capsys.readouterr().err
