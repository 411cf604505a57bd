"""Rules 40 and 46 with real processes: workers start, end, and never outlive their node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from atoll.node.core.events import (
    Answer,
    AnswerKind,
    BoundaryAsked,
    FailureKind,
    Merged,
    MergeMode,
    RankLost,
    SnapshotSealed,
    WorkersExited,
    WorkersFailed,
    WorkersJoined,
    WorkersLeft,
)
from atoll.node.daemon import processes
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.rank_commands import STOP_LIMIT_S, STORE_MODULE
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.daemon.site_log import OUTPUT_LOGGER
from atoll.node.local_protocol import ENV_GENERATION, ENV_SOCKET, Greeting
from atoll.node.worker.node_gone import EXIT_NODE_GONE
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.failures import unexpected
from tests.harness.pidfd import still_there
from tests.harness.ranks import Happened, ServedRanks

WORKERS = Path(__file__).parent.parent / "workers"
PLAIN = (sys.executable, str(WORKERS / "plain_worker.py"))
CLEANING = (sys.executable, str(WORKERS / "cleaning_worker.py"))
NONE_LEFT_S = 60.0
SETTINGS_JSON = settings_to_json(RunSettings(run_id="run"))

# A process that has children in sessions of their own, one with an empty environment; all wait for ever. A line is one
# write, also where PYTHONUNBUFFERED is set: lines of several processes would be mixed.
FAMILY = r"""
import os, subprocess, sys, time
code = "import os, time; print(f'pid {os.getpid()}\\n', end='', flush=True); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={})
print(f"pid {os.getpid()}\n", end="", flush=True)
time.sleep(1000)
"""


class Lines(logging.Handler):
    """What workers print, as it comes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put_nowait(record.getMessage())


class Site:
    """Workers under a server and a launcher in this process."""

    def __init__(self, config: NodeConfig) -> None:
        self.events: asyncio.Queue[Happened] = asyncio.Queue()
        self.exits: asyncio.Queue[WorkersExited] = asyncio.Queue()
        self.config = config
        self.server = ServedRanks(self.events.put_nowait, unexpected)
        self.launcher = Launcher(config, self.exits.put_nowait, unexpected)
        self.buffers: list[SharedBuffer] = []
        self.lines = Lines()

    async def begin(self, generation: int = 1) -> None:
        greeting = Greeting(settings_json=SETTINGS_JSON, data_paths=())
        self.group = self.server.serve(generation, self.config.num_ranks, greeting)
        await self.launcher.start(generation, self.server.path)

    async def expect(self, *events: Happened) -> None:
        for event in events:
            assert await self.events.get() == event

    async def admit(self, generation: int = 1) -> Layout:
        event = await self.events.get()
        assert isinstance(event, WorkersJoined), event
        layout = Layout(event.manifest)
        self.buffers = [SharedBuffer(layout.buffer_bytes, name) for name in ("SNAPSHOT", "PUBLISH")]
        await self.server.admit(layout, *self.buffers, run_seed=5)
        return layout

    async def answer_next(self, step: int, seq: int, answer: Answer, generation: int = 1) -> None:
        await self.expect(BoundaryAsked(generation=generation, step=step, seq=seq))
        self.server.answer(generation, step, seq, answer)


def config_of(**values: Any) -> NodeConfig:
    return NodeConfig(coordinator="127.0.0.1:1", name="a", **values)


@asynccontextmanager
async def running(
    *command: str, num_ranks: int = 1, launcher: str = "exec", num_threads: int = 1, stop_limit_s: float = STOP_LIMIT_S
) -> AsyncIterator[Site]:
    site = Site(config_of(launcher=launcher, command=command, num_ranks=num_ranks, num_threads=num_threads))
    output = logging.getLogger(OUTPUT_LOGGER)
    output.setLevel(logging.INFO)
    output.addHandler(site.lines)
    await site.server.start()
    try:
        with mock.patch("atoll.node.daemon.launcher.STOP_LIMIT_S", stop_limit_s):
            await site.begin()
            yield site
    finally:
        output.removeHandler(site.lines)
        await site.launcher.stop()
        await site.server.close()
        for buffer in site.buffers:
            buffer.close()


def in_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def go_on(next_step: int) -> Answer:
    return Answer(kind=AnswerKind.CONTINUE, next_step=next_step)


SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)


def wait_until_gone(pids: list[int]) -> None:
    """All of these processes end within the limit."""
    assert not still_there(pids, NONE_LEFT_S)


def test_a_stop_that_is_cancelled_is_finished_by_the_next() -> None:
    async def main() -> None:
        deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"
        async with running(sys.executable, "-c", deaf, stop_limit_s=0.1) as site:
            pid = int((await site.lines.queue.get()).split()[-1])
            stopping = asyncio.get_running_loop().create_task(site.launcher.stop())
            for _ in range(3):
                await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            assert stopping.cancelled()
            await site.launcher.stop()
            wait_until_gone([pid])

    in_loop(main)


def test_a_run_of_two_ranks(tmp_path: Path) -> None:
    """Snapshot, fresh values, a sync with steps after the boundary, a shift, and the end."""
    trace = tmp_path / "trace-{rank}"

    async def main() -> None:
        options = ("--tensors", "a=5x2,b=,n=2:mean,c=1:lowest,l=1:local,f=3:frozen", "--trace", str(trace))
        async with running(*PLAIN, *options, num_ranks=2) as site:
            layout = await site.admit()
            snapshot, publish = site.buffers
            await site.answer_next(0, 0, SNAPSHOT)
            await site.expect(SnapshotSealed(generation=1, step=0, tokens=0, num_steps=0, mean_loss=0.0, train_s=0.0))
            seeded = bytes(snapshot.view)
            assert any(seeded)
            publish.view[:] = seeded
            await site.answer_next(0, 1, Answer(kind=AnswerKind.APPLY, version=0, next_step=4, fresh=True))
            assert isinstance(await site.events.get(), Merged)
            await site.answer_next(4, 0, SNAPSHOT)
            sealed = await site.events.get()
            assert isinstance(sealed, SnapshotSealed)
            assert (sealed.tokens, sealed.num_steps, sealed.step) == (2 * 4 * 5, 4, 4)
            assert sealed.mean_loss > 0
            assert bytes(snapshot.view) != seeded
            # Two steps more, then the result; the second snapshot counts what the two steps added.
            await site.answer_next(4, 1, go_on(6))
            publish.view[:] = snapshot.view
            await site.answer_next(6, 0, Answer(kind=AnswerKind.APPLY, version=1, next_step=6, mode=MergeMode.MERGE))
            assert isinstance(await site.events.get(), Merged)
            await site.answer_next(6, 1, SNAPSHOT)
            sealed = await site.events.get()
            assert isinstance(sealed, SnapshotSealed)
            assert (sealed.tokens, sealed.num_steps) == (2 * 2 * 5, 2)
            before = bytes(snapshot.view)
            publish.view[:] = bytes(len(publish.view))  # a shift by nothing
            await site.answer_next(6, 2, Answer(kind=AnswerKind.APPLY, version=2, next_step=6, mode=MergeMode.SHIFT))
            assert isinstance(await site.events.get(), Merged)
            await site.answer_next(6, 3, SNAPSHOT)
            sealed = await site.events.get()
            assert isinstance(sealed, SnapshotSealed)
            assert sealed.tokens == 2 * 2 * 5  # a shift keeps what was trained
            offset = layout.tensor_offsets_bytes[0]
            assert bytes(snapshot.view)[offset : offset + 40] == before[offset : offset + 40]
            await site.answer_next(6, 4, Answer(kind=AnswerKind.STOP, reason="run over"))
            await site.expect(WorkersLeft(generation=1, reason="run over"))
            ending = await site.exits.get()
            assert (ending.code, ending.text) == (0, "the workers ended")

    in_loop(main)
    traces = [[json.loads(line) for line in (tmp_path / f"trace-{r}").read_text().splitlines()] for r in range(2)]
    owned = [t[0]["owned"] for t in traces]
    assert all(owned), "each writes some of what both have"
    assert sorted([*owned[0], *owned[1]]) == list(range(6))
    assert traces[0][-1]["event"] == "stop"
    # Replicas stayed equal to the last bit.
    digests = [[line["digest"] for line in t if line["event"] == "merged"] for t in traces]
    assert digests[0] == digests[1]


def test_any_number_of_shards_makes_the_same_snapshot() -> None:
    async def main() -> None:
        snapshots = []
        for num_ranks in (1, 2, 3):
            async with running(*PLAIN, "--tensors", "a=5x2,b=2", "--shard", num_ranks=num_ranks) as site:
                await site.admit()
                await site.answer_next(0, 0, SNAPSHOT)
                assert isinstance(await site.events.get(), SnapshotSealed)
                snapshots.append(bytes(site.buffers[0].view))
        assert snapshots[0] == snapshots[1] == snapshots[2]
        assert any(snapshots[0])

    in_loop(main)


def test_replicas_that_drift_apart() -> None:
    async def main() -> None:
        async with running(*PLAIN, "--drift-at", "2", "--fault-rank", "1", num_ranks=2) as site:
            await site.admit()
            await site.answer_next(0, 0, Answer(kind=AnswerKind.APPLY, version=0, next_step=3, fresh=True))
            assert isinstance(await site.events.get(), Merged)
            await site.answer_next(3, 0, SNAPSHOT)
            event = await site.events.get()
            assert isinstance(event, WorkersFailed)
            assert event.kind is FailureKind.FATAL
            assert "'a' [0:8, 0:4] have drifted apart at step 3: rank 0 (whose copy" in event.text

    in_loop(main)


@pytest.mark.parametrize(
    ("fault", "code", "printed", "failed"),
    [
        ("--crash-at", 3, "crashing at step 2", (RankLost, "closed its connection")),
        ("--fatal-at", 1, "told to give up", (WorkersFailed, "was told to give up (config)")),
        ("--nan-loss-at", 1, "loss is nan", (WorkersFailed, "loss is nan at step 2 (non_finite)")),
    ],
)
def test_faults_of_a_worker(
    fault: str, code: int, printed: str, failed: tuple[type[WorkersFailed | RankLost], str]
) -> None:
    async def main() -> None:
        async with running(*PLAIN, fault, "2") as site:
            await site.admit()
            await site.answer_next(0, 0, go_on(100))
            event = await site.events.get()
            assert isinstance(event, WorkersFailed | RankLost)
            assert type(event) is failed[0]
            assert failed[1] in event.text
            ending = await site.exits.get()
            assert (ending.generation, ending.code) == (1, code)
            assert ending.text.startswith(f"the workers ended with exit code {code}\n[rank 0] plain worker:")
            assert printed in ending.text
            # The next generation is served, and has no fault.
            await site.begin(2)
            await site.admit(2)
            await site.answer_next(0, 0, Answer(kind=AnswerKind.STOP, reason="enough"), generation=2)
            await site.expect(WorkersLeft(generation=2, reason="enough"))

    in_loop(main)


def test_one_step_too_many_on_one_rank() -> None:
    async def main() -> None:
        async with running(*PLAIN, "--extra-step-at", "2", "--fault-rank", "1", num_ranks=2) as site:
            await site.admit()
            await site.answer_next(0, 0, go_on(2))
            events = [await site.events.get()]
            if isinstance(events[0], BoundaryAsked):
                events.append(await site.events.get())
            event = events[-1]
            assert isinstance(event, WorkersFailed)
            assert "rank 1 asks at step 3" in event.text

    in_loop(main)


def test_a_hung_worker_is_ended_by_stop() -> None:
    async def main() -> None:
        async with running(*PLAIN, "--hang-at", "1") as site:
            await site.admit()
            await site.answer_next(0, 0, go_on(100))
            (rank,) = site.group.ranks
            fd = os.pidfd_open(rank.pid)
            await site.launcher.stop()
            assert await processes.ended([fd], 0.0)
            os.close(fd)
            assert site.exits.empty()

    in_loop(main)


def test_a_worker_that_ignores_sigterm() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )

    async def main() -> None:
        async with running(sys.executable, "-c", code, stop_limit_s=0.2) as site:
            assert await site.lines.queue.get() == "[rank 0] deaf"
            await site.launcher.stop()
            assert site.exits.empty()

    in_loop(main)


@pytest.mark.parametrize(
    ("number", "name"), [(int(signal.SIGKILL), "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")]
)
def test_a_killed_worker_leaves_no_children(number: int, name: str) -> None:
    """Also by one of the signals that have no name."""

    async def main() -> None:
        async with running(sys.executable, "-c", FAMILY) as site:
            pids = [int((await site.lines.queue.get()).split()[-1]) for _ in range(3)]
            os.kill(_parent_among(pids), number)
            ending = await site.exits.get()
            assert ending.code == -number
            assert ending.text.startswith(f"the workers were killed by {name}")
            wait_until_gone(pids)

    in_loop(main)


def _parent_among(pids: list[int]) -> int:
    """The one that the others descend from."""
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    (found,) = parents & set(pids)
    return found


def test_a_worker_ends_when_its_nodes_socket_closes() -> None:
    async def main() -> None:
        events: asyncio.Queue[Happened] = asyncio.Queue()
        server = ServedRanks(events.put_nowait, unexpected)
        await server.start()
        server.serve(1, 1, Greeting(settings_json=SETTINGS_JSON, data_paths=()))
        worker = await asyncio.create_subprocess_exec(
            *PLAIN, env={**os.environ, ENV_SOCKET: server.path, ENV_GENERATION: "1"}, stderr=subprocess.PIPE
        )
        assert isinstance(await events.get(), WorkersJoined)
        await server.close()
        async with asyncio.timeout(NONE_LEFT_S):
            _, errors = await worker.communicate()
        assert worker.returncode == EXIT_NODE_GONE
        assert errors.count(b"\n") == 1
        assert b"closed the connection; this worker ends" in errors

    in_loop(main)


def test_a_script_cleans_up_when_its_node_goes_and_ends_whatever_hangs(tmp_path: Path) -> None:
    """All at once: two of them are ended after seconds, one by its client and one by the kernel."""
    ends = {"sleeps": EXIT_NODE_GONE, "hangs": EXIT_NODE_GONE, "hangs-beside-python": -signal.SIGALRM}

    async def main() -> None:
        server = ServedRanks(lambda happened: None, unexpected)
        await server.start()
        server.serve(1, 1, Greeting(settings_json=SETTINGS_JSON, data_paths=()))
        workers = {}
        for how in ends:
            (tmp_path / how).mkdir()
            workers[how] = await asyncio.create_subprocess_exec(
                *CLEANING, str(tmp_path / how), how,
                env={**os.environ, ENV_SOCKET: server.path, ENV_GENERATION: "1"}, stdout=subprocess.PIPE,
            )  # fmt: skip
        for worker in workers.values():
            assert worker.stdout is not None
            assert (await worker.stdout.readline()).startswith(b"pid ")
        await server.close()
        async with asyncio.timeout(NONE_LEFT_S):
            assert {how: await worker.wait() for how, worker in workers.items()} == ends
        for how in ends:
            left = {path.name for path in (tmp_path / how).iterdir()}
            assert left == {"unwound", "begun"} | ({"ended"} if how == "sleeps" else set()), how

    in_loop(main)


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A killed node leaves its folders; `tmp_path` is too long for the path of a socket."""
    tmp_path_factory.getbasetemp()  # not within ours
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        yield


def tiny_node(
    launcher: str, num_ranks: int, num_processes: int, *command: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """A node process in the state that is wanted, and the processes below it."""
    paths = (str(WORKERS.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")]))  # it imports `tests`
    node = subprocess.Popen(
        [sys.executable, str(WORKERS / "tiny_node.py"), launcher, str(num_ranks), str(num_processes), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert node.stdout is not None
    line = node.stdout.readline()
    assert line, f"the node ended with {node.wait()}"
    below = [p.pid for p in descendants(node.pid)]
    assert set(json.loads(line)["pids"]) <= set(below)
    return node, below


def descendants(pid: int) -> list[processes.ProcessId]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := processes._stat(int(entry))) is not None:
            children.setdefault(stat.parent, []).append(int(entry))
    found, new = [], [pid]
    while new:
        for child in children.get(new.pop(), ()):
            new.append(child)
            if (stat := processes._stat(child)) is not None:
                found.append(processes.ProcessId(child, stat.start_ticks))
    return found


def kill_node(node: subprocess.Popen[str], below: list[int]) -> None:
    node.kill()
    node.wait()
    assert node.stdout is not None
    node.stdout.close()
    wait_until_gone(below)


def test_no_process_outlives_a_killed_node_with_joined_workers() -> None:
    kill_node(*tiny_node("exec", 2, 0, *PLAIN, "--step-delay-s", "0.01"))


def test_a_script_cleans_up_when_its_node_is_killed(tmp_path: Path) -> None:
    kill_node(*tiny_node("exec", 1, 1, *CLEANING, str(tmp_path), "takes-time"))
    assert (tmp_path / "ended").exists()


def test_no_process_outlives_a_killed_node_before_joining() -> None:
    """Nor do children of workers that nothing ties to them."""
    kill_node(*tiny_node("exec", 1, 3, sys.executable, "-c", FAMILY))


@pytest.mark.parametrize(
    ("launcher", "command", "interface", "words"),
    [
        ("exec", "/no/such/program", "lo", "cannot run /no/such/program: no such program"),
        ("python", "nowhere.py", "lo", "no such script: nowhere.py"),
        ("torchrun", "nowhere.py", "lo", "no such script: nowhere.py"),
        ("torchrun", PLAIN[1], "nowhere0", "network interface 'nowhere0': .*; this machine has .*lo"),
    ],
)
def test_what_cannot_be_started(launcher: str, command: str, interface: str, words: str, tmp_path: Path) -> None:
    async def main() -> None:
        config = config_of(launcher=launcher, command=(command,), interface=interface)
        found = Launcher(config, lambda ending: None, unexpected)
        with pytest.raises(ConfigError, match=words):
            await found.start(1, str(tmp_path / "node.sock"))
        await found.stop()

    in_loop(main)


RANK_SCRIPT = """
import os, sys, time
for i in range(3):
    print("line", i, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], sys.argv[1:])
print("pid", os.getpid())
time.sleep(0 if sys.argv[1:] == ["short"] else 1000)
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_lines_of_ranks_have_their_prefix(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK_SCRIPT)

    async def main() -> None:
        async with running(str(script), "short", num_ranks=2, launcher=launcher, num_threads=3) as site:
            ending = await site.exits.get()
            assert ending.code == 0, ending.text
            lines = [site.lines.queue.get_nowait() for _ in range(site.lines.queue.qsize())]
            for rank in range(2):
                own = [line for line in lines if line.startswith(f"[rank {rank}] line")]
                assert own == [f"[rank {rank}] line {i} {rank} 2 3 ['short']" for i in range(3)]

    in_loop(main)


@pytest.mark.parametrize("victim", ["node", "torchrun", "rank"])
def test_no_process_outlives_torchrun(victim: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK_SCRIPT)
    node, below = tiny_node("torchrun", 2, 2, str(script))
    if victim == "node":
        kill_node(node, below)
        return
    ranks = [pid for pid in below if b"train.py" in _command(pid) and b"torch.distributed.run" not in _command(pid)]
    agents = [p for p in below if b"torch.distributed.run" in _command(p) and b"child.py\0--\0" not in _command(p)]
    os.kill((agents if victim == "torchrun" else ranks)[0], signal.SIGKILL)
    wait_until_gone(below)  # the node hears of the exit and ends the rest
    assert node.stdout is not None
    node.stdout.close()
    assert node.wait() != 0


GROUP_SCRIPT = """
import os, sys, threading
import torch.distributed as dist
dist.init_process_group("gloo")
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, int(os.environ["LOCAL_RANK"]))
print("ranks", everybody)
if sys.argv[1:] == ["fails"] and dist.get_rank() == 1:
    raise ValueError("no such value")
print("pid", os.getpid())
threading.Event().wait()
"""


@pytest.mark.parametrize("victim", ["node", "store", "guard of the store", "rank"])
def test_no_process_outlives_ranks_that_met_in_the_store(victim: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP_SCRIPT)
    node, below = tiny_node("python", 2, 2, str(script))
    stores = [pid for pid in below if _serves_store(_command(pid))]
    guards = [pid for pid in below if STORE_MODULE.encode() in _command(pid) and pid not in stores]
    assert (len(stores), len(guards)) == (1, 1), "one store for both ranks, and its guard"
    if victim == "node":
        kill_node(node, below)
        return
    ranks = [pid for pid in below if b"train.py" in _command(pid) and b"child.py" not in _command(pid)]
    victims = {"rank": ranks, "guard of the store": guards, "store": stores}
    os.kill(victims[victim][0], signal.SIGKILL)
    wait_until_gone(below)  # the node hears of the exit and ends the rest
    assert node.stdout is not None
    node.stdout.close()
    assert node.wait() != 0


@pytest.mark.parametrize("killed", [False, True])
def test_how_ranks_of_a_group_end_is_told(killed: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP_SCRIPT)

    async def main() -> None:
        async with running(str(script), *(() if killed else ("fails",)), num_ranks=2, launcher="python") as site:
            seen: list[str] = []
            met = {"[rank 0] ranks [0, 1]", "[rank 1] ranks [0, 1]"}
            while not met <= set(seen) or sum(" pid " in line for line in seen) < (2 if killed else 1):
                seen.append(await site.lines.queue.get())
            if killed:
                (store,) = (p.pid for p in descendants(os.getpid()) if _serves_store(_command(p.pid)))
                os.kill(store, signal.SIGKILL)
            ending = await site.exits.get()
            first, *rest = ending.text.splitlines()
            if killed:
                assert (ending.code, first) == (-9, "the store of the workers' process groups was killed by SIGKILL")
            else:
                # Python's exit code, or torch's own threads abort first as the interpreter ends.
                aborted = (-6, "the workers were killed by SIGABRT")
                assert (ending.code, first) in ((1, "the workers ended with exit code 1"), aborted)
                of_rank_1 = [line for line in rest if line.startswith("[rank 1]")]
                assert any(line.endswith("ValueError: no such value") for line in of_rank_1), rest

    in_loop(main)


def _serves_store(command: bytes) -> bool:
    return STORE_MODULE.encode() in command and b"child.py" not in command


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
