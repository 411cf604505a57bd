"""From the coordinator's document to lines, tables, totals, and the moment to kill."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from atoll.cli.client import parse_status
from atoll.cli.demo_report import Totals
from atoll.cli.demo_view import View, picture
from atoll.cli.demo_watch import KillPlan, Watch
from atoll.cli.status import COLUMNS, table, text_lines
from atoll.coordinator.core.view.document import RunView
from atoll.protocol.errors import InvalidMessage


def site(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "site_id": 1, "name": name, "address": "127.0.0.1:1", "state": "member", "connected": True, "phase": "training",
        "inner_step": 20, "steps_per_s": 4.0, "loss": 2.5, "sent_bytes": 1000, "received_bytes": 2000, "train_s": 9.0,
        "wait_s": 1.0, "utilization": 0.9, "last_commit": 1, "state_hash": "ab" * 32, "incarnation": 1, "silent_s": 0.1,
        "state_kind": "member", "num_ranks": 1, "num_wrong_states": 0, "doing": "", "not_dialled_by": [],
        "up_bytes_per_s": None, "down_bytes_per_s": 1e6, "contributes_every": 1, "extra_s": 0.0,
        "norm": None, "cosine": None, "high_in_a_row": 0, "telemetry": {}, "has_told": False, "influence": None,
        "snapshot_s": 0.0,
    } | changes  # fmt: skip


def commit(number: int, contributors: Sequence[str] = ("a", "b"), **changes: Any) -> dict[str, Any]:
    return {
        "commit": number, "sync": number, "attempt": 1, "run_step": 20 * number, "contributors": list(contributors),
        "mean_loss": 2.5, "median_loss": 2.5, "state_hash": "", "final": False, "tokens": 5, "run_tokens": 5 * number,
        "cut": [],
    } | changes  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    commits = changes.get("commits", [])
    return {
        "run_id": "r", "state": "training", "state_kind": "training", "term": 1, "stopping": "", "changed": "",
        "min_sites": 1, "quorum": 1, "sync_every": 20, "num_attempts": 0, "num_evicted": 0, "num_wrong_states": 0,
        "num_refused": 0, "num_malformed": 0, "num_abandoned": 0, "branch": 0, "unreachable": "", "num_gone": 0,
        "losses": [[1, 20, 5, 2.5]], "started": True, "finished": False,
        "last_commit": commits[-1]["commit"] if commits else 0, "run_step": 20, "run_tokens": 5, "steps": 300,
        "tokens": 0, "codec": "int8", "num_parameters": 7, "state_hash": "", "attested_commit": None, "errors": [],
        "store_stuck_s": 0.0, "banned": [], "excluded": [], "num_at_the_door": 0, "slow_links": [],
        "robust": "warn", "contribution_bytes": 0, "average_share": None, "last_cosine": None, "codec_error": None,
        "high": [], "evictions": [], "num_not_finite": 0, "num_failed": 0,
        "syncs": [], "sites": [site("a"), site("b")], "commits": [], "data": [], "something_new": 1,
    } | changes  # fmt: skip


STARTING = {"state": "starting", "state_kind": "starting"}
SYNC = {
    "base_commit": 1, "num_steps": 20, "expected": ["a", "b"],
    "sync": 2, "fragment": "", "attempt": 0, "ready": ["a"], "wait": "not ready yet: b (site 2)",
    "contributors": [], "done": [], "receivers": [],
}  # fmt: skip


def test_the_coordinators_own_document_is_understood() -> None:
    from dataclasses import asdict

    from atoll.coordinator.core.core import Core
    from atoll.coordinator.core.persisted import Persisted, RunRecord
    from atoll.protocol.settings import RunSettings, settings_to_json

    settings = RunSettings(run_id="r", steps=40)
    core = Core(settings, Persisted(run=RunRecord(run_id="r", settings_json=settings_to_json(settings))), 0.0, 0.0)
    status = parse_status(json.loads(json.dumps(asdict(core.view(1.0)))))
    assert (status.run_id, status.steps, status.sites) == ("r", 40, ())
    assert status.state == "waiting for sites 0 of 1"


@pytest.mark.parametrize(
    "changes", [{"sites": 3}, {"run_id": 3}, {"sites": [3]}, {"sites": [{}]}, {"syncs": [{}]}, {"last_commit": None}]
)
def test_another_document_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match="another version"):
        parse_status(document(**changes))


def test_names_of_others_cannot_steer_the_terminal() -> None:
    status = parse_status(
        document(sites=[site("a\x1b[2J\n", state="gone: [red]x\x07", state_kind="gone")], errors=["\x1b]0;x"])
    )
    text = text_lines(status)
    assert "\x1b" not in text
    assert "\x07" not in text
    console = Console(file=io.StringIO(), record=True, width=200)
    console.print(table(status))
    assert "[red]x" in console.export_text()


def test_a_stuck_store_is_named() -> None:
    assert "store has not answered for 12 s" in text_lines(parse_status(document(store_stuck_s=12.0)))
    assert "store" not in text_lines(parse_status(document(store_stuck_s=0.1)))


def test_the_table_says_what_the_status_says() -> None:
    status = parse_status(document(sites=[site("a"), site("b", last_commit=None, state_hash="", **STARTING)]))
    lines = text_lines(status).splitlines()
    assert lines[0] == "run r: training, step 20 of 300, commit 0"
    assert [name for name in COLUMNS if name not in lines[1]] == []
    assert "90 %" in lines[2]
    assert "ababababab" in lines[2]
    assert lines[2].split()[:2] == ["a", "training"], "of a member what it does"
    assert lines[3].split()[:2] == ["b", "starting"]


def test_one_line_for_each_commit_and_change() -> None:
    watch = Watch()
    assert watch.observe(
        parse_status(document(state="waiting for sites 1 of 2", state_kind="waiting", sites=[site("a", **STARTING)]))
    ) == [
        "run: waiting for sites 1 of 2",
        "a: starting",
    ]
    assert watch.observe(parse_status(document())) == ["run: training", "a: member", "b: member"]
    assert watch.observe(parse_status(document(state="syncing (the last sync)", state_kind="syncing"))) == []
    two = [commit(1), commit(2, ["a"], attempt=2, mean_loss=None)]
    assert watch.observe(parse_status(document(commits=two))) == [
        "commit 1: step 20, a, b, training loss 2.500",
        "commit 2: step 40, a, attempt 2",
    ]
    assert watch.observe(parse_status(document(commits=two))) == []
    gone = [site("a"), site("b", state="gone: lost", state_kind="gone")]
    assert watch.observe(parse_status(document(commits=two, sites=gone))) == ["b: gone: lost"]


def test_crashes_of_workers_are_told_as_they_come_and_counted_over_starts_of_a_node() -> None:
    watch, told = Watch(), []
    for start, crashes in ((1, 0), (1, 1), (1, 1), (1, 3), (2, 0), (2, 1)):
        why = "rank 0: KeyError: 'x'" if crashes == 3 else ""
        seen = site("a", incarnation=start, telemetry={"num_crashes": crashes, "last_crash": why})
        told.append(watch.observe(parse_status(document(sites=[seen])))[-1:])
    line = ["a: its workers crashed or hung; logs/a.log has all of it"]
    with_reason = ["a: its workers crashed or hung: rank 0: KeyError: 'x'; logs/a.log has all of it"]
    assert told[1:] == [line, [], with_reason, [], line]
    assert (watch.num_crashes("a"), watch.num_crashes("b")) == (4, 0)


def test_sites_that_train_the_same_samples_are_told_once() -> None:
    watch, text = Watch(), "a (site 1) and b (site 2) had the same loss"
    told = [watch.observe(parse_status(document(same_samples=texts))) for texts in ([], [text], [text], [])]
    assert [text in lines for lines in told] == [False, True, False, False]


def test_the_status_says_which_workers_crashed_and_why() -> None:
    telemetry = {"num_crashes": 2, "last_crash": "exit code 1: [rank 0] KeyError: 'x'"}
    at_the_door = site("c", telemetry=telemetry, state_kind="starting", site_id=0)
    status = parse_status(document(sites=[site("a", telemetry=telemetry), site("b"), at_the_door]))
    lines = text_lines(status).splitlines()
    assert [line for line in lines if "crashed" in line] == [
        "the workers of a crashed 2 times since its node started, last: exit code 1: [rank 0] KeyError: 'x'"
    ]


@pytest.mark.parametrize("shown", [text_lines, lambda status: "\n".join(Watch().observe(status))])
def test_what_a_member_says_of_a_crash_drives_no_terminal_and_begins_no_line(shown: Callable[[RunView], str]) -> None:
    telemetry = {"num_crashes": 1, "last_crash": "x\x1b[2J\x1b]0;owned\x07\nthe run is over\x1b[31m"}
    text = shown(parse_status(document(sites=[site("a", telemetry=telemetry)])))
    (line,) = (line for line in text.splitlines() if "the run is over" in line)
    assert ": the run is over\\x1b[31m" in line
    assert "\x1b" not in text


def test_commits_that_a_site_is_in_are_counted_once() -> None:
    watch = Watch()
    for last in (1, 2):
        watch.observe(parse_status(document(commits=[commit(1), commit(2, ["b"])][:last])))
    assert (watch.num_commits("a"), watch.num_commits("b"), watch.num_commits("c")) == (1, 2, 0)


def test_counters_go_on_when_a_node_starts_again() -> None:
    watch = Watch()
    for start, sent, train_s, wait_s in ((1, 100, 4.0, 1.0), (1, 150, 6.0, 1.0), (2, 10, 1.0, 0.0), (2, 20, 2.0, 1.0)):
        seen = site("a", incarnation=start, sent_bytes=sent, train_s=train_s, wait_s=wait_s)
        watch.observe(parse_status(document(sites=[seen, site("b")])))
    totals = watch.totals("a")
    assert totals == Totals(sent_bytes=170, received_bytes=4000, utilization=0.8)
    assert watch.totals().sent_bytes == 1170
    assert watch.totals("c") == Totals(sent_bytes=0, received_bytes=0, utilization=None)


def test_the_kill_comes_after_a_third_and_the_return_two_commits_later() -> None:
    plan = KillPlan("b", expected_commits=9, started_s=0.0)
    acts = []
    history: list[dict[str, Any]] = []
    for number in range(1, 10):
        history.append(commit(number, ["a", "b"] if number <= 3 or number >= 7 else ["a"]))
        acts.append(plan.is_due(parse_status(document(commits=history)), 10.0 * number) and plan.in_words())
    killed = "killed at commit 3"
    restarted = f"{killed}, restarted at 5"
    back = f"{restarted}, back in commit 7"
    assert acts == [False, False, killed, False, f"{restarted}, recovering", False, back, False, False]
    assert plan.is_over


def test_a_site_that_is_not_back_is_said_to_be_recovering() -> None:
    plan = KillPlan("b", expected_commits=3, started_s=0.0)
    history = [commit(1), commit(2, ["a"]), commit(3, ["a"])]
    for count in (1, 3, 3, 3):
        plan.is_due(parse_status(document(commits=history[:count])), 1.0)
    assert plan.in_words() == "killed at commit 1, restarted at 3, recovering"


@pytest.mark.parametrize(("commit_s", "killed_at"), [(10.0, 5), (2.0, 5), (1.0, 3), (0.8, 2), (0.1, 2)])
def test_where_commits_are_quick_beside_a_start_the_site_is_killed_earlier(commit_s: float, killed_at: int) -> None:
    plan = KillPlan("b", expected_commits=15, started_s=100.0)
    history: list[dict[str, Any]] = []
    for number in range(1, 16):
        history.append(commit(number))
        for poll in range(3):  # looked at more often than there are commits
            at_s = 106.0 + commit_s * (number - 1 + poll / 3)
            if plan.is_due(parse_status(document(commits=history)), at_s):
                assert number == killed_at
                return
    pytest.fail("it was not killed")


def test_plain_lines_go_to_a_pipe() -> None:
    out = io.StringIO()
    with View(out) as view:
        view.say("commit 1")
        view.show(parse_status(document()), Watch(), {})
    assert out.getvalue() == "commit 1\n"


def test_a_line_is_not_cut_nor_read_as_markup() -> None:
    out = io.StringIO()
    line = "run: paused because [red]berlin[/] says :bug: " + "and more " * 30
    with View(out) as view:
        view.say(line)
    assert out.getvalue() == f"{line}\n"


def test_the_live_view_shows_sites_sync_traffic_and_notes() -> None:
    watch = Watch()
    status = parse_status(document(syncs=[SYNC]))
    watch.observe(status)
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(picture(status, watch, {"b": "killed at commit 3, recovering"}, 80))
    text = console.export_text()
    assert "received" not in text  # too narrow for everything
    for part in ("sync 2: not ready yet: b (site 2)", "b: killed at commit 3"):
        assert part in text
    assert "all sites: 2.0 KiB sent, 90 % of the time spent training" in text


def test_a_terminal_has_the_run_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    with View(out) as view:
        view.show(parse_status(document()), Watch(), {})
        view.say("hello")
    assert out.getvalue().index("hello") < out.getvalue().rindex("run r: training, step 20 of 300")


def test_the_status_says_what_each_open_sync_waits_for() -> None:
    exchanging = SYNC | {"sync": 3, "fragment": "0 of 4", "attempt": 2, "wait": "1 of 2 contributors are done"}
    lines = text_lines(parse_status(document(syncs=[SYNC, exchanging]))).splitlines()
    assert "sync 2: not ready yet: b (site 2)" in lines
    assert "sync 3 of fragment 0 of 4, attempt 2: 1 of 2 contributors are done" in lines


def test_a_long_reason_does_not_widen_the_table() -> None:
    reason = "gone: " + "the copies of a tensor have drifted apart; " * 4
    status = parse_status(document(sites=[site("a", state=reason, state_kind="gone"), site("b")], errors=[reason]))
    _, *lines, error = text_lines(status).splitlines()
    assert max(len(line) for line in lines) < 120
    assert reason.strip() in error


def test_who_is_banned_is_named_below_the_table() -> None:
    status = parse_status(document(banned=["c: sends garbage"], excluded=["b: 1e30 in sync 7"]))
    assert text_lines(status).splitlines()[-2:] == [
        "left out of a sync: b: 1e30 in sync 7",
        "banned: c: sends garbage",
    ]


def test_the_slowest_links_are_named_below_the_table() -> None:
    link = {"sender": "thin", "receiver": "a", "bytes_per_s": 31250.0}
    status = parse_status(document(slow_links=[link, link | {"sender": "a", "receiver": "thin"}]))
    assert text_lines(status).splitlines()[-1] == "the slowest links: thin to a 30.5 KiB/s, a to thin 30.5 KiB/s"


def test_a_site_that_rests_is_named_below_the_table_with_the_reason() -> None:
    status = parse_status(document(sites=[site("a"), site("thin", contributes_every=8, extra_s=2.8)]))
    said = "thin contributes to one sync of 8: its link makes each 2.8 s longer"
    assert text_lines(status).splitlines()[-1] == said


def test_who_cannot_be_dialled_is_named_below_the_table() -> None:
    status = parse_status(document(sites=[site("a"), site("b", not_dialled_by=["a", "c"])]))
    assert "cannot be dialled by a, c" in text_lines(status).splitlines()[-1]
