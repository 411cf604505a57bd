"""The demo from its first process to its report."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from atoll.cli import demo_report, demo_setup
from atoll.cli.client import local_status, parse_status
from atoll.cli.demo import DemoOptions
from atoll.cli.demo_processes import Child, Processes, crashes_in
from atoll.cli.demo_report import Report, SiteReport
from atoll.cli.demo_script import ScriptLosses, losses_of
from atoll.cli.demo_view import View
from atoll.cli.demo_watch import KillPlan, Watch
from atoll.cli.recorded import default_file, find_recorded
from atoll.coordinator.core.view.document import RunView
from atoll.node.dataplane.saved_manifest import load_manifest
from atoll.protocol.codecs.table import BUNDLE
from atoll.protocol.errors import AtollError, ConfigError, PeerError, WorkerError

POLL_S = 0.5
START_LIMIT_S = 60.0
QUIET_LIMIT_S = 300.0  # without a step or a commit anywhere
EXIT_LIMIT_S = 60.0  # of the nodes, once the run is over
LISTENING = re.compile(r"listening on \S+(?: \(status page (\S+)\))?")


class Demo:
    def __init__(self, options: DemoOptions) -> None:
        """Raises ConfigError for options that do not make a run."""
        self.options = options
        self.settings = demo_setup.demo_settings(options)
        self.folder, self._in_json = Path(), options.format == "json"
        self.names = demo_setup.site_names(options.num_sites)
        self._watch = Watch()
        self._num_commits = demo_setup.expected_commits(self.settings)
        self._kill = KillPlan(self.names[-1], self._num_commits, time.monotonic()) if options.kill else None

    def run(self) -> int:
        """0, or 1 if something that was promised did not happen. Raises AtollError, KeyboardInterrupt."""
        report = self.train()
        document = demo_report.as_document(report)
        (self.folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document) if self._in_json else demo_report.as_text(report, sys.argv[0]), flush=True)
        return 0 if document["ok"] else 1

    def train(self) -> Report:
        """From the first process to the last."""
        started_s = time.monotonic()
        self.folder = folder = demo_setup.prepare_folder(self.options.keep)
        demo_setup.write_run_file(self.settings, folder / "run.toml")
        try:
            with _interruptible(), Processes(folder / "logs", os.environ | {"PYTHONUNBUFFERED": "1"}) as processes:
                try:
                    with View(sys.stderr if self._in_json else sys.stdout) as view:  # people read the other one
                        view.say(f"{len(self.names)} sites on this machine; everything is kept in {folder}")
                        status = self._train(processes, folder, view)
                        processes.stop(["coordinator"])
                        elapsed_s = time.monotonic() - started_s
                        if not self.options.script:
                            view.say("evaluating on held-out text")
                except AtollError:
                    _show_guilty(processes)
                    raise
                except KeyboardInterrupt:
                    print(
                        "atoll demo: interrupted; stopping the sites and the coordinator", file=sys.stderr, flush=True
                    )
                    raise
        except KeyboardInterrupt:
            until = "" if self.options.keep else ", until the next demo replaces it"
            print(
                f"atoll demo: stopped after commit {self._watch.last_commit} of {self._num_commits}; logs, the run's "
                f"store and what its sites hold are in {folder}{until}",
                file=sys.stderr,
            )
            raise
        return self._report(status, folder, elapsed_s)

    def _train(self, processes: Processes, folder: Path, view: View) -> RunView:
        """Until all nodes have ended. Raises WorkerError if something stops on the way."""
        coordinator = processes.start("coordinator", demo_setup.coordinator_command(folder))
        page = wait_until_listening(coordinator)
        if page:
            view.say(f"status page: {page}")
        for name in self.names:
            demo_setup.let_in(folder, name)
            self._start_node(processes, folder, name)
        last_news_s, last_seen, over_since_s = time.monotonic(), (0, 0), 0.0
        while True:
            status = self._look(coordinator, folder)
            now_s = time.monotonic()
            for line in self._watch.observe(status):
                view.say(line)
            if self._kill is not None and self._kill.is_due(status, now_s):
                view.say(f"{self._kill.victim}: {self._kill.in_words()}")
                if len(self._kill.done) == 1:
                    processes.children[self._kill.victim].kill()
                elif len(self._kill.done) == 2:
                    self._start_node(processes, folder, self._kill.victim)
            view.show(status, self._watch, self._notes())
            nodes = [processes.children[name] for name in self.names]
            for node in nodes:
                if node.exit_code not in (None, 0) and not node.killed:
                    raise WorkerError(f"site {node.name} ended with exit code {node.exit_code}; see {node.log_path}")
            if all(node.exit_code == 0 for node in nodes):
                return self._look(coordinator, folder)  # the last state is attested before they end
            seen = (status.last_commit, sum(site.inner_step for site in status.sites))
            if seen != last_seen:
                last_news_s, last_seen = now_s, seen
            over_since_s = (over_since_s or now_s) if status.finished else 0.0
            if over_since_s and now_s - over_since_s > EXIT_LIMIT_S:
                late = ", ".join(node.name for node in nodes if node.exit_code is None)
                raise WorkerError(f"the run is over but {late} did not end within {EXIT_LIMIT_S:.0f} s")
            if now_s - last_news_s > QUIET_LIMIT_S:
                raise WorkerError(f"no step and no commit for {QUIET_LIMIT_S:.0f} s; the run says: {status.state}")
            _wait_for_any(nodes, POLL_S)

    def _look(self, coordinator: Child, folder: Path) -> RunView:
        if coordinator.exit_code is not None:
            raise WorkerError(
                f"the coordinator ended with exit code {coordinator.exit_code}; see {coordinator.log_path}"
            )
        return parse_status(local_status(demo_setup.store_path(folder)))

    def _start_node(self, processes: Processes, folder: Path, name: str) -> None:
        processes.start(name, demo_setup.node_command(self.options, folder, name))

    def _notes(self) -> dict[str, str]:
        return {self._kill.victim: self._kill.in_words()} if self._kill is not None else {}

    def _report(self, status: RunView, folder: Path, elapsed_s: float) -> Report:
        sites = tuple(self._site_report(name, demo_setup.model_folder(folder, name)) for name in self.names)
        saved = demo_setup.model_folder(folder, self.names[0])
        figures = {} if self.options.script else self._evaluate(saved if sites[0].state_hash else None)
        sync = self.settings.sync
        lasted = replace(self.settings, steps=status.steps)  # `atoll set` may have changed it
        up, down = sync.codec_up, sync.codec_down
        return Report(
            run_id=self.settings.run_id,
            num_parameters=status.num_parameters,
            steps=status.steps,
            sync_every=sync.every,
            longest_window=sync.window_steps(0, self._num_commits - 1) if sync.steps_at_nodes else sync.every,
            codec=up if down in (up, BUNDLE) else f"{up} up, {down} down",
            expected_commits=demo_setup.expected_commits(lasted),
            commits=status.last_commit,
            bits_per_byte_before=figures.get("before"),
            bits_per_byte_after=figures.get("after"),
            baselines=find_recorded(self.settings, self.options.num_sites, default_file()),
            script=self._losses(folder) if self.options.script else None,
            sites=sites,
            state_hash=status.state_hash,
            model_folder=str(_relative(saved)),
            elapsed_s=elapsed_s,
            killed=self._kill.in_words() if self._kill is not None else "",
            returned=self._kill is None or self._kill.is_over,
        )

    def _losses(self, folder: Path) -> ScriptLosses:
        """With --compare, one site trains alone here, after the others."""
        if not self.options.compare:
            return losses_of(self._watch.losses)
        alone = Demo(replace(self.options, num_sites=1, compare=False, kill=False, layouts="", keep=folder / "alone"))
        report = alone.train()
        return losses_of(self._watch.losses, alone._watch.losses, report.elapsed_s)

    def _site_report(self, name: str, model: Path) -> SiteReport:
        try:
            saved = load_manifest(model)
        except ConfigError:
            saved = None
        return SiteReport(
            **asdict(self._watch.totals(name)),
            name=name,
            state_hash=saved.state_hash.hex() if saved else "",
            commit=saved.commit if saved else None,
            note=self._notes().get(name, ""),
            num_commits=self._watch.num_commits(name),
            num_crashes=max(self._watch.num_crashes(name), crashes_in(self.folder / "logs" / f"{name}.log")),
        )

    def _evaluate(self, saved: Path | None) -> dict[str, float]:
        """Empty if it failed; the reason is on stderr."""
        from atoll.cli.demo_evaluate import evaluate  # torch, which nothing before needs

        try:
            return evaluate(self.settings, [str(path) for path in self.options.data], str(saved) if saved else None)
        except AtollError as error:
            print(f"atoll: {error}", file=sys.stderr)
            return {}


def wait_until_listening(coordinator: Child, limit_s: float = START_LIMIT_S) -> str:
    """The address of its status page, from the line that it prints. Raises WorkerError, PeerError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = LISTENING.search("\n".join(coordinator.tail()))
        if found:
            return found[1] or ""
        if coordinator.exit_code is not None:
            raise WorkerError(f"the coordinator ended with exit code {coordinator.exit_code} before it listened")
        _wait_for_any([coordinator], 0.05)
    raise PeerError(f"the coordinator did not listen within {limit_s:.0f} s; see {coordinator.log_path}")


def _wait_for_any(children: list[Child], limit_s: float) -> None:
    """Returns early when a child ends."""
    deadline = time.monotonic() + limit_s
    running = [child for child in children if child.exit_code is None]
    while running and all(child.exit_code is None for child in running):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(0.05, left_s))
    if not running:
        time.sleep(limit_s)


def _show_guilty(processes: Processes) -> None:
    """The last lines of whoever failed, or of everybody if nobody did."""
    failed = [c for c in processes.children.values() if c.exit_code not in (None, 0) and not c.killed]
    for child in failed or list(processes.children.values()):
        print(f"--- the last lines of {child.name} ({child.log_path})", file=sys.stderr)
        print("\n".join(child.tail()), file=sys.stderr, flush=True)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, and a second one of either does not cut the cleaning up short."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
