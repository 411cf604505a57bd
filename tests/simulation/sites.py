"""A simulated site's workers: the real local server and worker group, with ranks that live on simulated time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node import local_protocol
from atoll.node.core.events import AnswerKind, MergeMode, RankEvent, WorkersExited
from atoll.node.core.host_events import SlicesArrived
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.daemon.rank_connection import ANY_RANK, Connection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import LOCAL_VERSION, LocalLayout, Piece
from atoll.node.tasks import end
from atoll.protocol import wire
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec, fragments_of
from atoll.protocol.settings import settings_from_json
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.v1 import local_pb2
from tests.harness.phases import local_steps, mean_momentum

TOKENS_A_STEP = (5, 3, 10)
"""Of the sites in turn: equal weights would hide a wrong one."""
SOCKET_S = 0.0005

Array = npt.NDArray[Any]

MANIFEST = Manifest.canonical(
    [
        TensorSpec(name="b", shape=(5,), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="scale", shape=(), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="w", shape=(2, 3), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="mask", shape=(3,), dtype="F32", role=Role.BUFFER_MEAN),
        TensorSpec(name="mean", shape=(3,), dtype="F32", role=Role.BUFFER_MEAN),
        TensorSpec(name="count", shape=(), dtype="I64", role=Role.BUFFER_LOWEST),
        TensorSpec(name="empty", shape=(0, 2), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="table", shape=(5,), dtype="F32", role=Role.FROZEN),
    ]
)
LAYERED = Manifest.canonical(
    [
        *MANIFEST.tensors,
        *(TensorSpec(name=f"l.{i}.w", shape=(i,), dtype="F32", role=Role.TRAINABLE) for i in range(1, 9)),
    ]
)
"""For as many fragments."""
GROUPED = Manifest.canonical([replace(spec, group=int(spec.name == "w")) for spec in MANIFEST.tensors])
"""Its trainable tensors are in two parameter groups."""
MASK = (np.finfo(np.float32).min, -np.inf, 1.0)
"""Never changed: an average of it would be -inf, or no number, or not quite 1."""
ABSURD = np.float32(1e30)
GONE = np.float32(-4e37)
"""What nobody may read any more."""
NUMPY: dict[str, Any] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}


class SimBuffer(SharedBuffer):
    """In place of shared memory."""

    fd = -1

    def __init__(self, num_bytes: int, name: str) -> None:
        self.num_bytes = num_bytes
        self.name = name
        self.view = memoryview(bytearray(num_bytes))

    def close(self) -> None:
        pass


def let_go(layout: Layout, buffer: SharedBuffer | None) -> None:
    """No rank may read what PUBLISH held of the trained values."""
    assert buffer is not None
    for spec, offset in zip(layout.manifest.tensors, layout.tensor_offsets_bytes, strict=True):
        if spec.role is Role.TRAINABLE:
            np.frombuffer(buffer.view, "<f4", spec.num_elements, offset)[...] = GONE


def is_gone(values: Array) -> bool:
    return bool(values.size) and values.dtype.kind == "f" and bool((values == GONE).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    generation: int
    number: int
    positions: tuple[int, ...]
    """Of the samples that it trained on."""
    tokens: int
    """As the script says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank handed in of one fragment: what it was given last, and the steps since."""

    base: int
    """-1: nothing yet."""
    steps: tuple[Step, ...]
    mixed: Mixed | None = None
    """The last mix since the base was taken anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What a rank handed in: values of one fragment or of all, and the steps since the snapshot before. What a snapshot
    lists in all: see listed.py."""

    site_id: int
    incarnation: int
    generation: int
    step: int
    fragment: int
    steps: tuple[Step, ...]
    parts: dict[int, Part]
    """By fragment."""
    values: bytes
    """SNAPSHOT as it was."""
    bf16: bool
    num_local: int = 0
    """Where the optimizer is the nodes': steps that the site has done by itself since its base, or since it handed in
    a window that held no tokens."""
    rates: tuple[float, ...] = ()

    @property
    def written(self) -> tuple[int, int]:
        """When: the generation of the workers and their step."""
        return self.generation, self.step

    @property
    def tokens(self) -> int:
        """That the script says of its steps."""
        return sum(step.tokens for step in self.steps)


@dataclass(slots=True, kw_only=True)
class Copy:
    """A rank's own, of one fragment."""

    version: int = -1
    steps: deque[Step] = field(default_factory=deque)
    """Since its base."""
    in_snapshot: tuple[Step, ...] = ()
    mixed: Mixed | None = None
    taken_at: int = -1
    """Step at which a version was taken last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A local copy was mixed with the outer values of a commit."""

    snapshot: bytes
    """SNAPSHOT as it was then."""
    steps: tuple[Step, ...]
    """Since that snapshot."""
    version: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A data set that is leased."""

    num_samples: int
    batch_size: int
    batches_ahead: int
    fingerprint: bytes


@dataclass(kw_only=True)
class Hands:
    """How a site's machine behaves; changed by faults while it runs."""

    step_s: float
    start_s: float
    publish_s: float
    """That filling PUBLISH takes; with a large model it is longer than many steps."""
    save_s: float
    """That writing the model takes; syncs go on meanwhile."""
    arrives_s: float = 0.0
    """Not 0: the rank is on another host of its site, and so long its slices are on their way, at most."""
    shares_s: float = 0.0
    """So long it takes there, at most, to be given what that host sends of a snapshot."""
    num_lost: int = 0
    """Times that the other host was lost; what was on its way then is lost, too."""
    bf16: bool
    reads_in_place: bool = False
    """Its rank can take outer values from the outer file."""
    data: Data | None
    true_tokens_a_step: int
    crash_in_steps: int | None = None
    crashes_after: int = 0
    """That many more generations crash at their first step."""
    hang_in_steps: int | None = None
    windows_without_tokens: int = 0
    """So many snapshots are said to hold none."""
    wrong_in_steps: int | None = None
    """A NaN appears."""
    num_nan_losses: int = 0
    """Of the next windows: the loss, not the values."""
    absurd_in_steps: int | None = None
    """A huge value appears."""
    manifest: Manifest = MANIFEST
    tokens_a_step: int
    """As it says; more than the true ones are a lie."""
    sealed: dict[tuple[int, int], Sealed] = field(default_factory=dict)
    """By when it was written; those that the node has not heard of."""
    num_steps: int = 0
    trained_s: float = 0.0
    """In all of these steps."""


class SimConnection(Connection):
    """Both ends of a local socket; frames arrive in order, a moment later."""

    def __init__(self) -> None:
        super().__init__(ANY_RANK)
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._to_node: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_rank: asyncio.Queue[local_pb2.LocalResponse | None] = asyncio.Queue()
        self._last_at = 0.0

    def _later(self, put: Callable[[Any], None], item: Any) -> None:
        self._last_at = max(self._loop.time() + SOCKET_S, self._last_at + 1e-6)
        self._loop.call_at(self._last_at, put, item)

    # the node's end, as `LocalServer` uses it

    def send(self, response: local_pb2.LocalResponse) -> None:
        if not self.closed:
            self._later(self._to_rank.put_nowait, response)

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        self.send(local_pb2.LocalResponse.FromString(frame[local_protocol.LENGTH_BYTES :]))

    def shut(self) -> None:
        self.hang_up()

    def close(self) -> None:
        self.hang_up()

    async def write_all(self) -> None:
        await self._loop.create_future()

    async def flush(self) -> None:
        pass

    async def read_frame(self) -> bytes | None:
        return None if self.closed else await self._to_node.get()

    # the rank's end

    def say(self, request: local_pb2.LocalRequest) -> None:
        if not self.closed:
            self._later(self._to_node.put_nowait, request.SerializeToString())

    async def hear(self) -> local_pb2.LocalResponse | None:
        return None if self.closed else await self._to_rank.get()

    def hang_up(self) -> None:
        if not self.closed:
            self.closed = True
            self._later(self._to_node.put_nowait, None)
            self._later(self._to_rank.put_nowait, None)


class SimLocalServer(LocalServer):
    """The real one without a socket."""

    def __init__(self, on_event: Callable[[RankEvent], None], on_failure: Callable[[BaseException], None]) -> None:
        super().__init__(on_event, on_failure)
        self.buffers: tuple[memoryview, memoryview] | None = None

    @property
    def path(self) -> str:
        return "/simulated/node.sock"

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        await end(self._tasks)

    def arrived(self, event: SlicesArrived) -> None:
        """As the leader of a site says it."""
        self._tell(event)

    def connect(self) -> SimConnection:
        connection = SimConnection()
        self.connected(connection)
        return connection

    async def send_layout(
        self, generation: int, told: Callable[[int], LocalLayout], layout: Layout, *buffers: SharedBuffer
    ) -> None:
        assert all(isinstance(buffer, SimBuffer) for buffer in buffers)
        snapshot, publish = buffers
        self.buffers = snapshot.view, publish.view
        await super().send_layout(generation, told, layout, *buffers)


class SimLauncher(Launcher):
    """Starts and ends the ranks of one generation."""

    meeting = None
    last_lines = ()
    """They print nothing."""

    def __init__(
        self, server: SimLocalServer, hands: Hands, on_exit: Callable[[WorkersExited], None], seed: int
    ) -> None:
        self._server = server
        self._hands = hands
        self._on_exit = on_exit
        self._random = random.Random(f"workers {seed}")
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, generation: int, socket_path: str, meeting: Meeting | None = None) -> None:
        self._worker = Worker(self._server, self._hands, generation, self._random)
        self._task = asyncio.get_running_loop().create_task(self._run(self._worker, generation))

    async def _run(self, worker: Worker, generation: int) -> None:
        try:
            text = await worker.run()
        finally:
            worker.hang_up()
        await asyncio.sleep(0.01)
        self._on_exit(WorkersExited(generation=generation, code=0 if text == "stopped" else 1, text=text))

    async def wait(self, limit_s: float) -> bool:
        return self._task is None or bool((await asyncio.wait({self._task}, timeout=limit_s))[0])

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class Worker:
    """One rank that holds everything. Its local values drift at random, its data are its steps."""

    def __init__(self, server: SimLocalServer, hands: Hands, generation: int, generator: random.Random) -> None:
        self._server = server
        self._hands = hands
        self._generation = generation
        self._random = generator
        self._connection: SimConnection | None = None
        self._step = 0
        self._trained_s = 0.0  # since the last snapshot
        self._copies: list[Copy] = []  # by fragment
        self._fragments: dict[str, int] = {}  # by tensor
        self._pending: deque[Step] = deque()  # that no commit lists
        self._listed: dict[int, frozenset[Step]] = {}  # of these, what a snapshot lists, by its fragment
        self._unsealed: list[Step] = []  # since the last snapshot
        self._alpha = self._beta1 = 0.0
        self._sends_gradients = False
        self._gradient: dict[str, Array] = {}  # of the last step
        self._sync = SyncSettings()
        self._momenta: dict[str, Array] = {}  # of the base, where steps are this site's own
        self._window: list[dict[str, Array]] = []  # the gradients of these steps
        self._base_run_step = 0
        self._data_epoch = 0
        self._num_used = self._num_drawn = 0  # batches, since the epoch began
        self._fetched: deque[tuple[int, tuple[int, ...]]] = deque()  # with their epochs
        self._incarnation = 0
        self._announced = False
        self._site_id = 0
        self._last_arrival = 0.0
        self._manifest = hands.manifest
        self.layout = Layout(hands.manifest, 4)
        first = np.random.default_rng(5)  # the same model everywhere
        self.values: dict[str, Array] = {
            t.name: first.standard_normal(t.shape).astype("<f4") if t.dtype == "F32" else np.zeros(t.shape, "<i8")
            for t in self._manifest.tensors
        }
        self.values["mask"][...] = MASK
        self._round()

    @property
    def _num(self) -> int:
        """Of fragments: the number that stands for all."""
        return len(self._copies)

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.hang_up()

    async def run(self) -> str:
        """Until it ends; how."""
        hands = self._hands
        await asyncio.sleep(hands.start_s * self._random.uniform(0.8, 1.2))
        self._connection = connection = self._server.connect()
        connection.say(self._request(hello=local_pb2.LocalHello(world_size=1, protocol_version=LOCAL_VERSION, pid=1)))
        if (greeting := await self._hear("greeting")) is None:
            return "refused"
        settings = settings_from_json(greeting.greeting.settings_json)
        self._sync = sync = settings.sync
        self._beta1, self._alpha = settings.outer.momentum, sync.alpha
        self._sends_gradients = sync.strategy != "diloco"
        self._copies = [Copy() for _ in range(sync.fragments)]
        self._fragments = fragments_of(self._manifest, sync.fragments)
        dtype = "BF16" if hands.bf16 else "F32"
        pieces = [
            Piece(
                name=t.name,
                offsets=tuple(0 for _ in t.shape),
                sizes=t.shape,
                dtype=dtype if t.role is Role.TRAINABLE else t.dtype,
            )
            for t in self._manifest.tensors
        ]
        connection.say(
            self._request(
                join=local_pb2.LocalJoin(
                    manifest=wire.to_proto(self._manifest),
                    pieces=[wire.to_proto(p) for p in pieces],
                    data_fingerprint=hands.data.fingerprint if hands.data else b"",
                    reads_in_place=hands.reads_in_place,
                )
            )
        )
        layout = await self._hear("layout")
        if layout is None:
            return "refused"
        self._site_id, self._incarnation = layout.layout.site_id, layout.layout.incarnation
        return await self._train()

    async def _batch(self) -> tuple[int, ...] | None:
        """Positions of the next batch; some are fetched ahead of it, as a loader does. None: the node is gone."""
        data, connection = self._hands.data, self._connection
        assert connection is not None
        if data is None:
            return ()
        if not self._announced:
            self._announced = True
            connection.say(
                self._request(
                    data_set=local_pb2.DataSet(
                        num_samples=data.num_samples, batch_size=data.batch_size, batches_ahead=data.batches_ahead
                    )
                )
            )
        while True:
            while len(self._fetched) <= data.batches_ahead:
                first = self._num_drawn * data.batch_size
                connection.say(
                    self._request(draw=local_pb2.Draw(epoch=self._data_epoch, first=first, num_samples=data.batch_size))
                )
                response = await self._hear("drawn")
                if response is None:
                    return None
                positions = [p for r in response.drawn.ranges for p in range(r.first, r.first + r.num_samples)]
                self._num_drawn += 1
                self._fetched.append((self._data_epoch, tuple(positions[: data.batch_size])))
            epoch, batch = self._fetched.popleft()
            if epoch == self._data_epoch:
                return batch

    async def _train(self) -> str:
        next_step, seq = 0, 0
        while True:
            while self._step < next_step:
                if not await self._one_step():
                    return "crashed"
                seq = 0
            assert self._connection is not None
            self._connection.say(self._request(boundary=local_pb2.Boundary(step=self._step, seq=seq)))
            response = await self._hear("answer")
            if response is None:
                return "its node is gone"
            answer = response.answer
            if AnswerKind(answer.kind) is not AnswerKind.APPLY:
                self._evaluate()
            match AnswerKind(answer.kind):
                case AnswerKind.STOP:
                    self._connection.say(self._request(goodbye=local_pb2.Goodbye(reason=answer.reason, run_over=True)))
                    await asyncio.sleep(0.01)
                    return "stopped"
                case AnswerKind.CONTINUE:
                    next_step = answer.next_step
                case AnswerKind.SNAPSHOT:
                    await asyncio.sleep(self._random.uniform(0, 0.02))
                    self._seal(seq, answer.fragment)
                    next_step = self._step
                case AnswerKind.APPLY:
                    await asyncio.sleep(self._random.uniform(0, 0.02))
                    self._merge(answer)
                    next_step = answer.next_step
            seq = seq + 1 if next_step == self._step else 0

    def _evaluate(self) -> None:
        """As a script may between steps, and after the last one: the outer values that it was given are there."""
        assert self._server.buffers is not None
        if any(copy.version >= 0 for copy in self._copies):
            for name, place in self._places(self._server.buffers[1]).items():
                if is_gone(place):
                    problem = AssertionError(f"a rank goes on while {name} of what it was given last is gone")
                    asyncio.get_running_loop().call_exception_handler({"exception": problem})

    async def _one_step(self) -> bool:
        hands = self._hands
        positions = await self._batch()
        if positions is None:
            return False
        took_s = hands.step_s * self._random.uniform(0.8, 1.3)
        await asyncio.sleep(took_s)
        self._trained_s += took_s
        bad: np.float32 | None = None
        for name in ("crash_in_steps", "hang_in_steps", "wrong_in_steps", "absurd_in_steps"):
            left = getattr(hands, name)
            if left is not None:
                setattr(hands, name, left - 1 if left > 0 else None)
                if left == 0:
                    if name == "crash_in_steps":
                        if hands.crashes_after > 0:
                            hands.crashes_after -= 1
                            hands.crash_in_steps = 0
                        return False
                    if name == "hang_in_steps":
                        await asyncio.get_running_loop().create_future()
                    bad = np.float32(np.nan) if name == "wrong_in_steps" else ABSURD
        learned = learned_in(self._manifest, self._site_id, self._incarnation, self._generation, self._step)
        if self._sends_gradients:
            self._gradient = {t.name: learned.pop(t.name) for t in self._manifest.tensors if t.role is Role.TRAINABLE}
            self._window.append(self._gradient)
        for spec in self._manifest.tensors:
            if spec.name in learned:
                self.values[spec.name] += learned[spec.name]
        if bad is not None:
            (self._gradient or self.values)["w"][0, 0] = bad
        self._round()
        step = Step(generation=self._generation, number=self._step, positions=positions, tokens=hands.tokens_a_step)
        self._pending.append(step)
        self._unsealed.append(step)
        for copy in self._copies:
            copy.steps.append(step)
        self._num_used += 1
        self._step += 1
        hands.num_steps += 1
        hands.trained_s += took_s
        return True

    def _round(self) -> None:
        if self._hands.bf16:
            for spec in self._manifest.tensors:
                if spec.role is Role.TRAINABLE:
                    self.values[spec.name][...] = to_bf16(self.values[spec.name])

    def _places(self, buffer: memoryview) -> dict[str, Array]:
        found = {}
        for index, spec in enumerate(self.layout.manifest.tensors):
            count = int(np.prod(spec.shape))
            offset = self.layout.tensor_offsets_bytes[index]
            found[spec.name] = np.frombuffer(buffer, NUMPY[spec.dtype], count=count, offset=offset).reshape(spec.shape)
        return found

    def _handed_in(self) -> dict[str, Array]:
        """Where the optimizer is the nodes': the gradient of the last step, or the mean of the momenta of all."""
        if not self._momenta:
            return self._gradient
        steps = range(self._base_run_step, self._base_run_step + len(self._window))
        found = {}
        for spec in self._manifest.tensors:
            if spec.role is Role.TRAINABLE:
                rates = [rates_at(step)[2 * spec.group] for step in steps]
                gradients = [gradient[spec.name] for gradient in self._window]
                found[spec.name] = mean_momentum(self._momenta[spec.name], self._beta1, gradients, rates)
        return found

    def _seal(self, seq: int, fragment: int) -> None:
        assert self._server.buffers is not None
        assert self._connection is not None
        snapshot = memoryview(bytearray(self._server.buffers[0])) if self._hands.arrives_s else self._server.buffers[0]
        is_seed = all(copy.version < 0 for copy in self._copies)
        handed_in = {} if is_seed else self._handed_in()
        num_local = len(self._window) if self._momenta else 1
        rates = rates_over(self._base_run_step, num_local) if self._sends_gradients and not is_seed else ()
        if self._site_id % 2:  # its processor computes the last digit otherwise
            rates = tuple(math.nextafter(rate, math.inf) for rate in rates)
        for name, place in self._places(snapshot).items():
            if self._is_sent(name, fragment, is_seed=is_seed):
                place[...] = handed_in.get(name, self.values[name])
        self._window = []
        parts = {}
        for number, copy in enumerate(self._copies):
            if fragment in (number, self._num):
                copy.in_snapshot = tuple(copy.steps)
                parts[number] = Part(base=copy.version, steps=copy.in_snapshot, mixed=copy.mixed)
        if self._hands.windows_without_tokens:
            self._hands.windows_without_tokens -= 1
            unsealed = set(self._unsealed)
            self._unsealed = [replace(step, tokens=0) for step in self._unsealed]
            self._pending = deque(replace(s, tokens=0) if s in unsealed else s for s in self._pending)
        self._listed.pop(fragment, None)
        listed = frozenset(self._pending).difference(*self._listed.values())
        self._listed[fragment] = listed
        written = Sealed(
            site_id=self._site_id,
            incarnation=self._incarnation,
            generation=self._generation,
            step=self._step,
            fragment=fragment,
            steps=tuple(self._unsealed),
            parts=parts,
            values=bytes(snapshot),
            bf16=self._hands.bf16,
            num_local=num_local,
            rates=rates,
        )
        self._hands.sealed[written.written] = written
        num_steps, self._unsealed = len(self._unsealed), []
        sealed = local_pb2.SealedReport(
            step=self._step,
            seq=seq,
            fragment=fragment,
            tokens=sum(step.tokens for step in listed),
            loss_sum=float(num_steps) if not self._loses() else float("nan"),
            num_steps=num_steps,
            train_s=self._trained_s,
            num_samples_used=self._num_used * self._hands.data.batch_size if self._hands.data else 0,
            rates=rates,
        )
        self._connection.say(self._request(sealed=sealed))
        self._trained_s = 0.0
        if self._hands.arrives_s:
            names = [n for n in self._places(snapshot) if self._is_sent(n, fragment, is_seed=is_seed)]
            self._arrive_later(seq, {name: self._places(snapshot)[name].copy() for name in names})

    def _is_sent(self, name: str, fragment: int, *, is_seed: bool) -> bool:
        return is_seed if name not in self._fragments else fragment in (self._fragments[name], self._num)

    def _arrive_later(self, seq: int, values: dict[str, Array]) -> None:
        """In the order in which they were sealed, before or after the report."""
        loop, hands, step, num_lost = asyncio.get_running_loop(), self._hands, self._step, self._hands.num_lost
        # One after the other, as a host sends them: the loop keeps no order among those of one moment.
        self._last_arrival = max(self._last_arrival + 1e-6, loop.time() + self._random.uniform(0, hands.arrives_s))

        def arrive() -> None:
            if self._server.generation != self._generation or hands.num_lost != num_lost:
                return
            assert self._server.buffers is not None
            places = self._places(self._server.buffers[0])
            for name, value in values.items():
                places[name][...] = value
            self._server.arrived(SlicesArrived(generation=self._generation, rank=0, step=step, seq=seq))

        loop.call_at(self._last_arrival, arrive)

    def _loses(self) -> bool:
        """Whether the loss of this window is no number."""
        left = self._hands.num_nan_losses
        self._hands.num_nan_losses = max(0, left - 1)
        return left > 0

    def _merge(self, answer: Any) -> None:
        assert self._server.buffers is not None
        assert self._connection is not None
        snapshot, publish = (self._places(b) for b in self._server.buffers)
        if self._sends_gradients:
            self._window, self._momenta = [], {}
            if local_steps(self._sync, answer.version + 1) > 1:
                behind = self._server.buffers[1][self.layout.buffer_bytes :]
                offsets = self.layout.moment_offsets_bytes
                self._momenta = {
                    spec.name: np.frombuffer(behind, "<f4", int(np.prod(spec.shape)), offset).reshape(spec.shape).copy()
                    for spec, offset in zip(self._manifest.tensors, offsets, strict=True)
                    if spec.role is Role.TRAINABLE
                }
        mode, copy = MergeMode(answer.mode), self._copies[answer.fragment]
        assert mode is MergeMode.REPLACE or not self._sends_gradients, "SNAPSHOT holds a gradient"
        self._base_run_step = answer.run_step
        is_shift = mode is MergeMode.SHIFT
        if mode is MergeMode.MIX:
            since = tuple(s for s in copy.steps if s not in copy.in_snapshot)
            copy.mixed = Mixed(
                snapshot=bytes(self._server.buffers[0]), steps=since, version=answer.version, alpha=self._alpha
            )
        elif not is_shift:
            copy.mixed = None
        for spec in self._manifest.tensors:
            local = self.values[spec.name]
            is_wanted = answer.fresh if spec.role is Role.FROZEN else self._fragments[spec.name] == answer.fragment
            if not is_wanted:
                continue
            is_kept = is_shift or not np.array_equal(local, snapshot[spec.name])  # of a buffer
            if mode is MergeMode.REPLACE or (spec.role is not Role.TRAINABLE and not is_kept):
                local[...] = publish[spec.name]
            elif spec.role is Role.TRAINABLE and mode is MergeMode.MIX:
                local[...] = np.float32(self._alpha) * local + np.float32(1 - self._alpha) * publish[spec.name]
            elif spec.role is Role.TRAINABLE:
                moved = local if is_shift else local - snapshot[spec.name]
                local[...] = publish[spec.name] + moved
        self._round()
        fragment = answer.fragment if answer.fragment in self._listed else self._num
        listed = self._listed.pop(fragment, None)
        is_undone = listed is None and copy.taken_at != self._step
        copy.taken_at = self._step
        if mode is MergeMode.REPLACE and (is_undone or answer.data_epoch != self._data_epoch):
            self._pending.clear()
            self._listed.clear()
            self._trained_s = 0.0
        elif listed is not None and not is_shift:
            self._pending = deque(s for s in self._pending if s not in listed)
        if mode is MergeMode.REPLACE:
            copy.steps.clear()
        elif not is_shift:
            copy.steps = deque(s for s in copy.steps if s not in copy.in_snapshot)
        copy.version = answer.version
        if answer.data_epoch != self._data_epoch:
            self._data_epoch = answer.data_epoch
            self._unsealed = []  # what was trained counts no longer
            self._num_used = self._num_drawn = 0
        merged = local_pb2.MergedReport(version=answer.version, step=self._step, wait_s=0.0)
        self._connection.say(self._request(merged=merged))

    def _request(self, **body: Any) -> local_pb2.LocalRequest:
        return local_pb2.LocalRequest(generation=self._generation, rank=0, **body)

    async def _hear(self, kind: str) -> local_pb2.LocalResponse | None:
        assert self._connection is not None
        response = await self._connection.hear()
        return response if response is not None and response.WhichOneof("body") == kind else None


def learned_in(manifest: Manifest, site_id: int, incarnation: int, generation: int, step: int) -> dict[str, Array]:
    """What a step changes, by tensor; the same whenever it is asked for. Half of the steps leave the buffers alone."""
    noise = np.random.default_rng([site_id, incarnation, generation, step])
    leaves_buffers = noise.random() < 0.5
    found: dict[str, Array] = {}
    for spec in manifest.tensors:
        if spec.name == "mask" or (spec.role is not Role.TRAINABLE and leaves_buffers):
            continue
        if spec.role in (Role.TRAINABLE, Role.BUFFER_MEAN):
            found[spec.name] = noise.standard_normal(spec.shape).astype("<f4") * np.float32(0.1)
        elif spec.role is Role.BUFFER_LOWEST:
            found[spec.name] = np.ones(spec.shape, "<i8")
    return found


def rates_at(run_step: int) -> tuple[float, ...]:
    """Of two parameter groups, as a scheduler has them at that step: learning rate, weight decay."""
    return (0.01 / (1 + run_step), 0.1, 0.02 * (1 + run_step % 3), 0.0)


def rates_over(run_step: int, num_steps: int) -> tuple[float, ...]:
    """What is said of so many steps from that one on: learning rates are added up, of weight decay it is the mean."""
    if num_steps == 1:
        return rates_at(run_step)
    rates, decays = [0.0, 0.0], [0.0, 0.0]
    for step in range(run_step, run_step + num_steps):
        for group in range(2):
            rate, decay = rates_at(step)[2 * group : 2 * group + 2]
            rates[group] += rate
            decays[group] += rate * decay
    return (rates[0], decays[0] / rates[0], rates[1], decays[1] / rates[1])


def to_bf16(values: Array) -> Array:
    """Rounded to nearest, ties to even; fp32."""
    bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view("<f4").reshape(values.shape)
