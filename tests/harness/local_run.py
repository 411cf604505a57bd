"""A whole run on this machine for tests and benchmarks: a coordinator and nodes as real processes, on loopback.

    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        run.start_node("a", WORKER)
        run.wait(lambda status: status["state_kind"] == "finished", timeout_s=60)

Waiting polls the coordinator's status (there is nothing to await in another process); every wait has a limit and
fails with the last lines of all logs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from atoll.cli.client import local_status
from atoll.cli.config import default_store
from atoll.cli.template import render
from atoll.coordinator import admin
from atoll.protocol.addresses import is_loopback
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust import enrolled
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from tests.harness.loop_guard import BlockingInLoop
from tests.harness.sockets import free_address
from tests.harness.warm_start import Forked, warm_start

Status = dict[str, Any]
POLL_S = 0.1
GRACE_S = 10.0
"""Of a process that a test is done with; what does not end by then is killed."""
ANSWER_LIMIT_S = END_LIMIT_S = START_LIMIT_S = 60.0
"""Of a hang: where twenty processes share a core, an answer or an end takes many seconds."""
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 100),
]
GUARDED = ("-m", "tests.harness.guarded")
"""What Python runs: the `atoll` command, with event loops in which nothing may block."""
PLAIN = ("-m", "atoll")
"""The same as it is, to be measured."""


def guarded_with(constant: str, value: float) -> list[str]:
    """The program of a command that waits for less: one constant, as `atoll.node.daemon.main.NAME`, is another one."""
    module = constant.rpartition(".")[0]
    code = f"import sys, {module}; from tests.harness import guarded; {constant} = {value}; sys.exit(guarded.run())"
    return ["-c", code]


def in_plain_text(address: str) -> str:
    """The flag."""
    return "--insecure" if is_loopback(address) else "--insecure-network"


def _begin(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
    begins = len(GUARDED) + 1
    arguments = list(command[begins:])
    if tuple(command[:begins]) == (sys.executable, *GUARDED) and (warm := warm_start(arguments)).fits(environment):
        return warm.start(arguments, environment)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


class Process:
    """A process whose output is kept in a file and can be awaited line by line."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.out"
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_asked = False
        self.popen = _begin(command, {**os.environ, **environment})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with open(self.log, "ab", buffering=0) as file:
            for line in self.popen.stdout:
                file.write(line)
                with self._changed:
                    self._lines.append(line.decode(errors="replace").rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def lines(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def wait_for_line(self, pattern: str, timeout_s: float) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(m for m in (re.search(pattern, line) for line in self._lines) if m)
            return bool(found) or not self._reader.is_alive()

        with self._changed:
            self._changed.wait_for(look, timeout_s)
        assert found, f"{self.name} never printed {pattern!r}:\n" + "\n".join(self.lines[-40:])
        return found[0]

    def wait(self, timeout_s: float) -> int:
        code = self.popen.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        self.popen.kill()
        self.wait(END_LIMIT_S)

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)

    def ask_to_end(self) -> None:
        """Once: it would end at once if it were asked again."""
        if self.popen.poll() is None and not self._is_asked:
            self._is_asked = True
            self.popen.terminate()

    def end(self) -> None:
        self.ask_to_end()
        if self.popen.poll() is None:
            try:
                self.popen.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(END_LIMIT_S)
        self._reader.join(END_LIMIT_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class LocalRun:
    """The coordinator and the nodes of one run, each a process; leaving the context ends those that are left.

    `prefix` of a process: a command in front of it (`ip netns exec NAME`). `secured`: not in plain text; each site is
    invited, and joins.
    """

    def __init__(
        self, folder: Path, settings: RunSettings, program: Sequence[str] = GUARDED, *, secured: bool = False
    ) -> None:
        self.folder = folder
        self.secured = secured
        self.program = program
        self.settings = settings
        self.address = ""
        self.reached_at: list[str] = []
        """Where sites that are invited reach the coordinator, if it is not at its address."""
        self.processes: list[Process] = []
        self.coordinator: Process | None = None
        self.nodes: dict[str, Process] = {}
        self._channel: grpc.Channel | None = None  # to the coordinator, for its status
        self.toml = folder / "run.toml"
        tables: dict[str, dict[str, Any]] = {"run": {}, "coordinator": {"http_listen": ""}}
        for key, value in asdict(settings).items():
            if isinstance(value, dict):
                tables[key] = value
            else:
                tables["run"][key] = value
        self.toml.write_text(render(tables))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            self._channel.close()
        # A site that leaves needs its coordinator, which may have been started after it; and sites leave side by side.
        nodes = list(self.nodes.values())
        for process in nodes:
            process.ask_to_end()
        for process in (*nodes, *reversed(self.processes)):
            process.end()
        if error is not None:
            sys.stderr.write(self.story())
            return
        blocked = [line for process in self.processes for line in process.lines if BlockingInLoop.__name__ in line]
        assert not blocked, "\n".join([*blocked, self.story()])

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Process:
        process = Process(name, command, self.folder, environment or {})
        self.processes.append(process)
        return process

    def start_coordinator(
        self,
        listen: str = "",
        prefix: Sequence[str] = (),
        extra: Sequence[str] = (),
        *,
        until: str = r'listening on (?P<address>[^\s"]+)',
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> Process:
        """Again after it was killed: on the same port and store. On loopback if `listen` does not say where."""
        listen = self.address or listen or free_address()
        program = program or self.program
        command = [*prefix, sys.executable, *program, "coordinator", str(self.toml), "--listen", listen]
        command += [] if self.secured else [in_plain_text(listen)]
        process = self.start("coordinator", [*command, *extra], environment)
        self.address = process.wait_for_line(until, START_LIMIT_S).groupdict().get("address", listen)
        self.coordinator = process
        return process

    def start_node(
        self,
        name: str,
        worker: Sequence[str] = (),
        *,
        launcher: str = "exec",
        prefix: Sequence[str] = (),
        extra: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> Process:
        """`worker`: the command of the site's workers; empty for the built-in trainer. `program`: of a node that is
        another one than the run's."""
        command = [*prefix, sys.executable, *(program or self.program)]
        if not self.secured:
            command += ["node", in_plain_text(self.address), "--coordinator", self.address, "--name", name]
        elif (self.home(name) / enrolled.FOLDER / enrolled.IDENTITY).exists():
            command += ["node"]
        else:
            command += ["join", str(self.invite(name))]
        command += ["--home", str(self.home(name)), "--launcher", launcher, "--threads", "1", *extra]
        if worker:
            command += ["--", *worker]
        self.nodes[name] = self.start(name, command, environment)
        return self.nodes[name]

    @property
    def store_path(self) -> Path:
        return default_store(self.toml)

    def invite(self, name: str, **asked: Any) -> Path:
        """The file of an invite for this site, for a host of a site (`two-host1`), or for another role."""
        file = self.folder / f"{name}.invite"
        site, is_host, number = name.partition("-host")
        who = {"role": "host", "name": f"{site}/{number}"} if is_host else {"role": "site", "name": name}
        usual: dict[str, Any] = {**who, "addresses": self.reached_at}
        file.write_text(admin.ask(self.store_path, "invite", **usual | asked))
        return file

    def home(self, name: str) -> Path:
        return self.folder / "homes" / name

    def journal(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        path = self.home(name) / "journal.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if not kind or line["kind"] == kind]

    def status(self) -> Status:
        if self.secured:
            return local_status(self.store_path)
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        stub = session_pb2_grpc.CoordinatorServiceStub(self._channel)
        status: Status = json.loads(
            stub.Status(session_pb2.StatusRequest(), timeout=ANSWER_LIMIT_S, wait_for_ready=True).json
        )
        return status

    def wait(
        self,
        condition: Callable[[Status], bool],
        timeout_s: float,
        what: str = "the condition",
        status: Callable[[], Status] | None = None,
    ) -> Status:
        """`status`: another way to ask than over gRPC."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = (status or self.status)()
            if condition(found):
                return found
            assert time.monotonic() < deadline, (
                f"{what}: not within {timeout_s} s; status:\n{json.dumps(found, indent=1)}"
            )
            time.sleep(POLL_S)

    def wait_all(self, timeout_s: float, names: Sequence[str] = ()) -> dict[str, int]:
        """Exit codes of nodes."""
        deadline = time.monotonic() + timeout_s
        codes = {}
        for name in names or list(self.nodes):
            try:
                codes[name] = self.nodes[name].wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {name} did not end within {timeout_s} s\n{self.story()}") from None
        return codes

    def hashes(self, commit: int) -> dict[str, str]:
        """State hash after `commit` of every node that applied it."""
        return {
            name: line["state_hash"]
            for name in self.nodes
            for line in self.journal(name, "commit")
            if line["commit"] == commit
        }

    def story(self) -> str:
        parts = []
        for process in self.processes:
            parts.append(f"--- {process.name} (exit code {process.popen.poll()})")
            parts.extend(process.lines[-25:])
        return "\n".join(parts) + "\n"
