"""docs/operations.md, "Sites that nobody can dial", as people would type it: three sites behind NAT, with one private
address for all, a public coordinator and a public relay. Nobody can dial a site, a site comes out to one port alone,
that of the relay, and they train. The run is seen from one place, a site is banned, and all wires are searched for what
the machines hold."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sqlite3
import sys
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from atoll.coordinator.core.records import CommitRecord
from atoll.coordinator.rows import decode
from atoll.protocol.errors import RefusedError
from atoll.protocol.settings import RunSettings, settings_from_json
from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.names import Kind, Subject
from tests.harness.local_run import GUARDED, LocalRun, Process, Status
from tests.harness.nat import GATE, HUB, WATCH, Nat, available
from tests.harness.pages import typed_on
from tests.process.test_pages_elsewhere import Browser
from tests.process.test_secured_runs import count_contributors
from tests.workers.plain_worker import normal, parse_tensors

SITES = ("north", "south", "west")
HOSTS = {"hub": HUB, "gate": GATE, "you": WATCH, "watch": WATCH} | {name: name for name in SITES}
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
MOST_COMMANDS = 3
TENSORS = "secret_tensor=200x100:frozen,w=30x40"
WORKERS = Path(__file__).parents[1] / "workers"
WORKER = [sys.executable, str(WORKERS / "plain_worker.py"), "--step-delay-s", "0.02", "--tensors", TENSORS]
INSTEAD = {
    "hub.example": HUB,
    "gate.example": GATE,
    "--time-limits wan": "--time-limits local --sync-every 15 --codec fp32",
    "-- train.py": "--launcher exec --threads 1 -- " + shlex.join(WORKER),
}
"""What the test types instead."""
PORT, COORDINATOR_PORT, PAGE_PORT = 443, 7700, 7701
PROMETHEUS = "127.0.0.1:9090"
PIECE_BYTES, EVERY_BYTES = 32, 8000
LIMIT_S = 150.0


def missing() -> str:
    """Why this cannot be done here; empty if it can."""
    return available() or ("" if which("prometheus") else "needs Debian's package prometheus")


pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"three sites behind NAT, seen by a Prometheus: {missing()}"),
]


class Machines:
    """Of the page. What a command names is below one folder: files are where they would be copied to."""

    def __init__(self, run: LocalRun, nat: Nat) -> None:
        self._run, self._nat = run, nat

    def type(self, machine: str, command: str) -> Process:
        """Waits for its end, or, of what serves, until it does."""
        for text, instead in INSTEAD.items():
            command = command.replace(text, instead)
        program, *words = (self._here(word) for word in shlex.split(command))
        if program == "prometheus":
            return self._prometheus(Path(words[-1]))
        there = {} if "run.toml" in command and words[0] != "coordinator" else self._nat.there(HOSTS[machine])
        process = self._run.start(f"{machine}-{words[0]}", [sys.executable, *GUARDED, *words], there)
        if machine in SITES:
            self._run.nodes[machine] = process
        elif words[0] in ("coordinator", "relay"):
            process.wait_for_line("listening on", LIMIT_S)
        else:
            assert process.wait(LIMIT_S) == 0, f"{machine}$ {command}\n" + "\n".join(process.lines)
        return process

    def _here(self, word: str) -> str:
        folder = self._run.folder
        if word.endswith(".invite"):
            return str(next(folder.glob(f"*/{word}")))
        if word in ("run.toml", "invites", "sites"):
            return str(folder / word)
        return word.replace("~", str(folder / "homes"))

    def _prometheus(self, configuration: Path) -> Process:
        configuration.write_text(configuration.read_text().replace("interval: 15s", "interval: 1s"))
        begun = [*self._nat.prefix(WATCH), "prometheus", "--config.file", str(configuration), "--log.level", "warn"]
        data = ["--storage.tsdb.path", str(self._run.folder / "data"), "--web.listen-address", PROMETHEUS]
        return self._run.start("prometheus", [*begun, *data])


def known_pieces(settings: RunSettings) -> list[bytes]:
    """Of a tensor that all sites hold, and some fetch from others: short enough to be in one frame."""
    (spec,) = [spec for spec in parse_tensors(TENSORS) if spec.name == "secret_tensor"]
    data = normal(spec, settings.seed, 1).tobytes()
    return [data[at : at + PIECE_BYTES] for at in range(0, len(data), EVERY_BYTES)]


def memory_of(pid: int) -> Iterator[bytes]:
    """Of a process, region by region, as far as it can be read."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(text, 16) for text in re.split("[- ]", line)[:2])
            if " r" not in line or end - begin > 1 << 30:
                continue
            try:
                memory.seek(begin)
                yield memory.read(end - begin)
            except (OSError, ValueError, OverflowError):
                continue  # of the kernel's


def num_found(pieces: Iterable[bytes], parts: Iterable[bytes]) -> int:
    left = set(pieces)
    for part in parts:
        left -= {piece for piece in left if piece in part}
    return len(set(pieces)) - len(left)


def can_dial(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def check_dialling(nat: Nat) -> None:
    listening = nat.inside("north", lambda: socket.create_server(("", 7)))
    with listening:
        assert nat.inside("north", partial(can_dial, "127.0.0.1", 7)), "somebody listens at north"
        assert nat.inside("south", partial(can_dial, GATE, PORT)), "south comes out"
        assert nat.inside(WATCH, partial(can_dial, HUB, COORDINATOR_PORT))
        assert not nat.inside("south", partial(can_dial, HUB, COORDINATOR_PORT)), "by one port alone"
        assert not nat.inside("south", partial(can_dial, nat.router_address("north"), 7))
        assert not nat.inside(HUB, partial(can_dial, nat.router_address("north"), 7))


def check_prometheus(run: LocalRun, nat: Nat) -> None:
    """It asks the coordinator alone, and knows of all sites."""

    def asked(path: str, **parameters: str) -> Any:
        url = f"http://{PROMETHEUS}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def known() -> Status:
        try:
            found = asked("query", query="atoll_site_commit > 0 and on (site) atoll_site_received_bytes_total > 0")
        except OSError as error:
            return {"error": str(error)}
        return {"sites": sorted(one["metric"]["site"] for one in found["result"])}

    run.wait(lambda s: s.get("sites") == [*SITES], LIMIT_S, "all sites are in it", partial(nat.inside, WATCH, known))
    targets = nat.inside(WATCH, partial(asked, "targets"))["activeTargets"]
    assert [(target["scrapePool"], target["health"]) for target in targets] == [("atoll", "up")]


def test_three_sites_behind_nat_one_page_one_prometheus_and_nothing_on_the_wires(tmp_path: Path) -> None:
    commands = [(machine, command) for machine, command in typed_on(PAGE) if machine]
    assert Counter(machine for machine, _ in commands).keys() == HOSTS.keys()
    assert max(Counter(machine for machine, _ in commands).values()) <= MOST_COMMANDS
    with Nat(SITES, PORT) as nat, LocalRun(tmp_path, RunSettings(run_id="unused"), secured=True) as run:
        run.toml.unlink()
        frames = tmp_path / "frames"
        sniffer = [*nat.prefix(HUB), sys.executable, str(WORKERS / "sniffer.py"), str(frames)]
        run.start("sniffer", sniffer).wait_for_line("listening", LIMIT_S)
        machines = Machines(run, nat)
        served = [machines.type(machine, command) for machine, command in commands]
        relay = next(process for process in served if process.name == "gate-relay")
        status = run.wait(lambda s: count_contributors(s, 3), LIMIT_S, "all three contribute")
        settings = settings_from_json(json.dumps(status["settings"]))
        assert {site["address"] for site in status["sites"]} == {f"{name}@{GATE}:{PORT}" for name in SITES}
        first = status["last_commit"]
        run.wait(lambda s: s["last_commit"] > first + 2 and count_contributors(s, 3), LIMIT_S)
        check_dialling(nat)
        check_prometheus(run, nat)

        pieces = known_pieces(settings)
        assert num_found(pieces, memory_of(run.nodes["north"].popen.pid)) > len(pieces) // 2, "it is found where it is"
        assert num_found([*pieces, b"secret_tensor"], memory_of(relay.popen.pid)) == 0
        assert num_found([settings.run_id.encode()], memory_of(relay.popen.pid)) == 1

        machines.type("you", 'atoll ban west --home ~/you --reason "it lies"')
        assert run.wait_all(LIMIT_S, ["west"]) == {"west": RefusedError.exit_code}
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last + 1 and count_contributors(s, 2), LIMIT_S, "the others go on")

        found = enrolled.load(run.home("north") / enrolled.FOLDER)
        assert found is not None
        salt = certificates.salt_of(certificates.from_pem(found.shown.roots)[0])
        token = (run.folder / "homes" / "prometheus" / "token").read_text().strip()
        page = Subject(settings.run_id, Kind.PAGE).dns_name(salt)
        browser = Browser(run, PAGE_PORT, page, run.folder / "homes" / "prometheus" / "root.pem", HUB)
        shown = nat.inside(WATCH, lambda: browser.asks("/status.json", Host=HUB, Authorization=f"Bearer {token}"))
        document = json.loads(shown.text)
        assert {site["name"]: site["connected"] for site in document["sites"]} == dict.fromkeys(SITES, True) | {
            "west": False
        }
        assert document["banned"] == ["west: it lies"]

        for name in ("north", "south"):
            run.nodes[name].interrupt()
        assert run.wait_all(LIMIT_S, ["north", "south"]) == {"north": 0, "south": 0}
        check_hashes(run, first)
        coordinator = next(process for process in served if process.name == "hub-coordinator")
        coordinator.interrupt()
        assert coordinator.wait(LIMIT_S) == 0
        check_ban(run)
        seen = frames.read_bytes()
        handshakes = [Subject(settings.run_id, *who).dns_name(salt) for who in ((Kind.RELAY,), (Kind.SITE, "north"))]
        assert num_found([name.encode() for name in [*handshakes, page]], [seen]) == 3, (
            "the handshakes with the relay, with north through it, and with the page"
        )
        assert num_found([*pieces, *secrets(run, settings), token.encode(), found.shown.key], [seen]) == 0


def secrets(run: LocalRun, settings: RunSettings) -> list[bytes]:
    """Words that all machines say to each other."""
    keys = [(run.home(name) / "key").read_bytes() for name in SITES]
    words = [settings.run_id, "secret_tensor", "chunk_elements", "time_limits", "fp32", "it lies", "atoll_site"]
    return [word.encode() for word in (*words, *SITES)] + keys + [key.hex().encode() for key in keys]


def check_ban(run: LocalRun) -> None:
    """By the order of the coordinator's records and of each node's journal; how long it took is printed."""
    with sqlite3.connect(f"file:{run.store_path}?mode=ro", uri=True) as store:
        ((ban, banned_at),) = store.execute("SELECT seq, kept_at FROM records WHERE kind = 'ban'").fetchall()
        rows = store.execute("SELECT seq, body FROM records WHERE kind = 'commit' ORDER BY seq").fetchall()
    before, after = dict[int, list[str]](), dict[int, list[str]]()  # contributors by commit
    for seq, body in rows:
        record = decode("commit", body)
        assert isinstance(record, CommitRecord)
        names = sorted(member.name for member in record.commit.contributors)
        (before if seq < ban else after)[record.commit.commit] = names
    assert any("west" in names for names in before.values())
    assert ["north", "south"] in after.values()
    assert not any("west" in names for names in after.values())
    ended = {"west": [line for line in run.journal("west") if line["kind"] == "exit"][-1]["time_s"]}
    for name in ("north", "south"):
        lines = run.journal(name)
        cut = next(at for at, line in enumerate(lines) if line.get("names") == ["west"])
        applied = next(
            at for at, line in enumerate(lines) if (line["kind"], line.get("commit")) == ("commit", min(after))
        )
        assert cut < applied, "its streams are cut before the next commit"
        ended[name] = lines[cut]["time_s"]
    took = ", ".join(f"{name} {at - banned_at:.2f} s" for name, at in ended.items())
    sys.stdout.write(f"from the record of the ban to the end of west's node, and to its streams at others: {took}\n")


def check_hashes(run: LocalRun, first: int) -> None:
    last = max(commit for commit in range(first, run.status()["last_commit"] + 1) if len(run.hashes(commit)) > 1)
    assert last > first
    assert any(len(run.hashes(commit)) == 3 for commit in range(first, last))
    for commit in range(first, last + 1):
        assert len(set(run.hashes(commit).values())) == 1
