"""A training process under its node: between two boundaries it counts, at a boundary it does what the node says."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.node.core.events import Answer, AnswerKind, MergeMode
from atoll.node.local_protocol import MAX_SKIPPED_STEPS, NO_CHECKPOINTS, DataSet, LocalJoin, SealedReport
from atoll.node.worker import readings
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.connection import Connection, disconnect, ranks_here
from atoll.node.worker.draws import LeasedBatches
from atoll.node.worker.left_out import LeftOut
from atoll.node.worker.local_steps import WindowStart
from atoll.node.worker.logged_values import LoggedValues
from atoll.node.worker.losses import DEFAULT_MAX_SKIPPED, Losses, SpoiledError
from atoll.node.worker.naming import Naming
from atoll.node.worker.optimizer_state import OptimizerState, keeps_no_state
from atoll.node.worker.optimizers import NodeOptimizer, check, rated_groups
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.ramp import LearningRateRamp, RampSteps, steps_of_ramp
from atoll.node.worker.ranks_together import ranks_together
from atoll.node.worker.script_checks import ScriptChecks
from atoll.node.worker.script_state import ScriptState
from atoll.node.worker.site import DEFAULT_BUSY_LIMIT_S, AmongSites, Mark, Site, Step
from atoll.node.worker.tensors import BufferPolicy, find_tensors
from atoll.protocol.errors import AtollError, ConfigError, NotYetError
from atoll.protocol.sample_order import GLOBAL_LINE, SampleOrder

PROGRESS_EVERY_S = 1.0


@dataclass(slots=True)
class _Window:
    """What the next snapshot reports."""

    first_step: int
    train_s: float = 0.0


class JoinedSite(Site):
    """Under a node."""

    def __init__(
        self,
        connection: Connection,
        *,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: Mapping[str, BufferPolicy] | None,
        ramp_steps: RampSteps | None,
        data_fingerprint: bytes,
        data_rank: int | None,
        naming: Naming,
        has_own_frozen: bool,
        state: Mapping[str, Any] | None = None,
        max_skipped: int = DEFAULT_MAX_SKIPPED,
    ) -> None:
        super().__init__()
        self._connection, self._client = connection, connection.client
        self.settings = connection.settings
        self._optimizers = optimizers
        self._losses = Losses(self.rank, max_skipped)
        check(optimizers, connection.settings.sync, connection.settings.outer)
        self._of_node = [optimizer for optimizer in optimizers if isinstance(optimizer, NodeOptimizer)]
        self._left_out = LeftOut(self._of_node, self.rank, max_skipped)
        self._rated = rated_groups(optimizers)
        self._ramp_steps = steps_of_ramp(ramp_steps, connection.settings.trainer.ramp_steps, optimizers)
        self._ramp: LearningRateRamp | None = None
        self._data_rank = self.rank if data_rank is None else data_rank
        self._tensors = tensors = find_tensors(modules, optimizers, buffers, naming, has_own_frozen=has_own_frozen)
        for name in tensors.mean_buffers_not_finite():
            sys.stderr.write(
                f"atoll: the buffer {name!r} holds values that are not finite. It must not change in training, because "
                f'they have no mean; if it does: atoll.join(..., buffers={{"{name}": "local"}})\n'
            )
        self._checks = ScriptChecks(tensors, optimizers, max_skipped, connection.settings.sync.fragments)
        self._checkpoints: LocalCheckpoints | None = None
        self._checkpoint_every = connection.settings.checkpoint_every
        folder, unkept = connection.greeting.checkpoint_folder, keeps_no_state(optimizers)
        is_kept = bool(folder) and not unkept and not self._of_node  # optimizers may differ from rank to rank
        together = ranks_together(ranks_here(), self.world, tensors.device, is_wanted=is_kept) if folder else None
        if folder and unkept:
            if self.rank == 0:
                sys.stderr.write(
                    f"atoll: no checkpoints are written of {unkept}: when workers crash, the inner optimizer begins "
                    "fresh\n"
                )
        elif is_kept:
            copy_keys = self._checks.copies.keys
            self._checkpoints = LocalCheckpoints(
                Path(folder),
                OptimizerState(tensors, optimizers, copy_keys),
                connection.settings.run_id,
                self.rank,
                self.world,
                here=ranks_here(),
                crashed_from=connection.greeting.crashed_from,
                busy=self._client.busy,
                script=ScriptState(state, optimizers) if state else None,
                together=together,
            )
        if state and self._checkpoints is None and self.rank == 0:
            sys.stderr.write(
                f"atoll: no checkpoints are written here, so {', '.join(sorted(state))} of state= begin again after a "
                "crash\n"
            )
        offered = LocalJoin(
            manifest=tensors.manifest,
            pieces=tensors.pieces if self.world == 1 else tensors.pieces_with_first_values(),
            data_fingerprint=data_fingerprint,
            data_rank=self._data_rank,
            checkpoints=self._checkpoints.usable if self._checkpoints is not None else (),
            names_are_said=naming.is_said,
            tied_here=tensors.tied_here,
            reads_in_place=all(held.local().device.type == "cpu" for held in tensors.held),
        )
        if connection.is_starting:
            connection.is_starting = False
            self._client.busy("", 0.0)
        joined = self._client.join(offered, connection.settings.sync.num_shared_moments)
        self._told = told = joined.told
        self._shared = SharedTensors(tensors, joined, connection.settings.sync, optimizers)
        # Ranks ask at the first boundary after this, and only when all have asked does one go on: until then no file
        # is written or removed.
        kept_names = {tensors.pieces[index].name for index in told.kept_pieces}
        self._restored_step = (  # of the run, at which the optimizers' state was written
            self._checkpoints.go_on(told.checkpoint, told.incarnation, self._client.generation, kept_names)
            if self._checkpoints is not None
            else None
        )
        self.site_id, self.seed, self._num_data_ranks = told.site_id, told.data_seed ^ told.reader, told.num_readers
        self._reader = told.reader
        num_sites = connection.settings.min_sites
        self._among = AmongSites((told.site_id - 1) % num_sites, num_sites)
        self._data_epoch = 0
        self._num_fragments = connection.settings.sync.fragments
        self._listed: dict[int, Mark] = {}  # what a snapshot in flight lists, by fragment: what no other one does
        self._taken: dict[int, tuple[MergeMode, int]] = {}  # of each fragment's last APPLY here: how, and at which step
        self._publish_changes = False  # the next one is being written
        self._window = _Window(0)
        self._next_step = 0  # ask there
        self._wait_s = 0.0
        self._resumed_at_s = self._reported_at_s = time.monotonic()
        self._reported_step = self._resumed_step = 0
        self._logged = LoggedValues(self._client.logged)
        self._busy: list[tuple[str, float]] = []  # announced, and until when; inner ones last
        self._boundary()

    @property
    def has_outer_parameters(self) -> bool:
        modes = [mode for mode, _ in self._taken.values()]
        return len(modes) > 0 and MergeMode.SHIFT not in modes and not self._publish_changes

    def step(self, tokens: int | None = None, loss: Tensor | float | None = None) -> Step:
        if not self.running:
            return Step(False, False, self.inner_step)
        if not self._checks.is_step(loss):
            return self._go_on_without_a_step()
        if loss is not None:
            self._losses.add(loss, self.inner_step + 1)
        is_left_out = bool(self._of_node) and self._left_out.do_or_leave_out(loss, self._steps + 1)
        self._count(0 if is_left_out else tokens)
        if self._steps == 1 and self._restored_step is not None:
            # At once: where workers crash without a step, the node lets go of the checkpoint.
            self._client.progress(1, math.nan)
        if self._ramp is not None and not self._ramp.advance():
            self._ramp = None
        if self._checkpoints is not None:
            since = self._steps % self._checkpoint_every
            if since == 0:
                self._checkpoints.write(self._steps, self.inner_step)
            elif since in (1, self._checkpoint_every // 2):  # some optimizers have no state after their first step
                self._checkpoints.prepare()
            else:
                self._checkpoints.prepare_more()
        synced = False
        if self._steps >= self._next_step:
            synced = self._boundary()
        else:
            now_s = time.monotonic()
            if now_s - self._reported_at_s >= PROGRESS_EVERY_S:
                self._report_progress(now_s)
        for optimizer in self._of_node:
            optimizer.handed_in()
        return Step(self.running, synced, self.inner_step)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        if not self.has_outer_parameters:
            if self._publish_changes:
                why = "the outer parameters are just changing; this site takes the new ones after its next step or so"
            else:
                why = (
                    "this site took the last sync without having been part of it, so it does not hold the outer "
                    "parameters; wait for the next sync"
                )
            raise NotYetError(f"{why} (site.has_outer_parameters says when)")
        self._tensors.reshard()
        saved = self._shared.swap_in()
        try:
            with self._checks.no_steps(), self._holding_outer():
                yield
        finally:
            self._tensors.reshard()
            self._shared.swap_back(saved)

    @contextmanager
    def busy(self, what: str, limit_s: float = DEFAULT_BUSY_LIMIT_S) -> Iterator[None]:
        if not 0 <= limit_s < math.inf:
            raise ConfigError(f"site.busy got limit_s = {limit_s}; give the seconds after which it must be over")
        began_s = time.monotonic()
        self._busy.append((what, began_s + limit_s))
        self._client.busy(what, limit_s)
        try:
            yield
        finally:
            self._busy.pop()
            what, until_s = self._busy[-1] if self._busy else ("", 0.0)
            self._client.busy(what, max(0.0, until_s - time.monotonic()))
            if not self._busy:
                # Is neither training nor part of the step rate; a boundary or report within it has begun anew.
                now_s = time.monotonic()
                self._resumed_at_s += now_s - max(began_s, self._resumed_at_s)
                self._reported_at_s += now_s - max(began_s, self._reported_at_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ramp is not None:
            self._ramp.remove()
        self._checks.close()
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._logged.close()
            self._client.goodbye("the training ended" if self.running else "told to stop", run_over=not self.running)
            self.running = False
        else:
            self._connection.tell(error)
            if isinstance(error, Exception) and not isinstance(error, AtollError):
                # Other ranks fail by what this one's clean-up ends: the node is to know which was first.
                sys.stderr.write(f"atoll: rank {self.rank} fails with {type(error).__name__}\n")
            if isinstance(error, Exception) and self._checkpoints is not None and self._checkpoints.is_writing:
                traceback.print_exception(error)  # the node may take the wait for a hang, and end this rank in it
        if self._checkpoints is not None:
            self._checkpoints.finish()
        for optimizer in self._of_node:
            optimizer.leave()
        self._shared.close()
        disconnect()

    def _lease(self, num_samples: int, batch_size: int, ahead: int, *, of_shards: bool = False) -> LeasedBatches:
        assert self.settings is not None
        line = self.site_id if self.settings.data == "local" else GLOBAL_LINE
        order = SampleOrder(self._told.run_seed, line, num_samples)
        if self.running:  # else it was told to stop when it joined: it draws nothing
            self._client.announce_data(
                DataSet(num_samples=num_samples, batch_size=batch_size, batches_ahead=ahead, of_shards=of_shards)
            )
        return LeasedBatches(
            self._client.draw,
            order,
            batch_size,
            reader=self._told.reader,
            num_readers=self._told.num_readers,
            epoch=self._data_epoch,
        )

    # --- between boundaries

    def _go_on_without_a_step(self) -> Step:
        if self._batches is not None:
            self._batches.step()
        if time.monotonic() - self._reported_at_s >= PROGRESS_EVERY_S:
            self._report_progress(time.monotonic())
        return Step(self.running, False, self.inner_step)

    def _report_progress(self, now_s: float) -> None:
        rate = (self._steps - self._reported_step) / (now_s - self._reported_at_s)
        self._logged.flush()
        checkpoints = self._checkpoints.counts if self._checkpoints is not None else NO_CHECKPOINTS
        self._client.progress(
            self._steps,
            rate,
            checkpoints,
            readings.of_this_rank(
                self._tokens, self._losses.num_skipped + self._checks.num_skipped + self._left_out.num
            ),
        )
        self._reported_at_s, self._reported_step = now_s, self._steps

    # --- at a boundary

    def _boundary(self) -> bool:
        """Do what the node says until it says to go on or to stop. Returns whether an outer update was taken."""
        asked_at_s = time.monotonic()
        self._window.train_s += asked_at_s - self._resumed_at_s
        if self._steps > self._reported_step == self._resumed_step:
            self._report_progress(asked_at_s)  # a window too short for a report in the middle of it
        self._tensors.reshard()
        synced = is_handed_in = False
        seq = 0
        while True:
            asked_s = time.monotonic()
            answer = self._client.boundary(self._steps, seq)
            self._wait_s += time.monotonic() - asked_s
            if answer.kind is AnswerKind.STOP:
                self.running, self.run_over = False, answer.run_over
                for optimizer in self._of_node:
                    optimizer.leave()
                break
            if answer.kind is AnswerKind.SNAPSHOT:
                self._write_snapshot(answer, seq)
                is_handed_in = True
            else:
                if answer.kind is AnswerKind.APPLY:
                    self._apply(answer)
                    synced, is_handed_in = True, False
                self._publish_changes = answer.kind is AnswerKind.CONTINUE and answer.version > 0
                self._next_step = answer.next_step
                if self._next_step > self._steps:
                    if is_handed_in and self._of_node:
                        self._begin_anew()
                    break
            seq += 1
        self._resumed_at_s = self._reported_at_s = time.monotonic()
        self._reported_step = self._resumed_step = self._steps
        return synced

    def _write_snapshot(self, answer: Answer, seq: int) -> None:
        window, is_seed = self._window, not self._taken
        self._listed.pop(answer.fragment, None)
        in_flight = self._listed.values()
        listed = Mark(
            self._steps - self._base.steps - sum(mark.steps for mark in in_flight),
            self._tokens - self._base.tokens - sum(mark.tokens for mark in in_flight),
        )
        self._listed[answer.fragment] = listed
        mean_loss = self._mean_loss()
        # Of all steps: the time of the window is divided by them. A loss that is given now and then is their mean.
        num_steps = self._steps - window.first_step if mean_loss is not None else 0
        self._checks.check(self._steps, self._tokens)
        if not is_seed:
            self._say_if_undivided()
            self._shared.check_frozen()
            if self._tensors.own_frozen is not None:
                self._tensors.own_frozen.check()
        self._shared.write_snapshot(answer.fragment, with_frozen=is_seed)
        report = SealedReport(
            step=self._steps,
            seq=seq,
            fragment=answer.fragment,
            data_rank=self._data_rank,
            tokens=listed.tokens,
            loss_sum=(mean_loss or 0.0) * num_steps,
            num_steps=num_steps,
            train_s=window.train_s,
            hashes=self._shared.hashes() if answer.hash_shared else (),
            num_samples_used=self._batches.num_samples_used if self._batches is not None else 0,
            rates=()
            if is_seed
            else tuple(r for o, number in self._rated for r in o.rates[2 * number : 2 * number + 2]),
            skipped_steps=self._left_out.steps[:MAX_SKIPPED_STEPS],
        )
        self._client.sealed(report)
        self._window = _Window(self._steps)

    def _note_base(self, answer: Answer) -> None:
        """The base has what the snapshot of the fragment listed if a commit holds it. One that no commit holds is
        listed again with the next snapshot, whichever fragment that is of. Values undo nothing of a fragment that was
        taken at this step already: what was trained before it may be listed for others."""
        listed = self._listed.pop(answer.fragment, None) or self._listed.pop(self._num_fragments, None)
        is_undone = listed is None and self._taken.get(answer.fragment, (None, -1))[1] != self._steps
        if answer.mode is MergeMode.REPLACE and (is_undone or answer.data_epoch != self._data_epoch):
            self._base = Mark(self._steps, self._tokens)
            self._listed.clear()
            self._window = _Window(self._steps)  # its steps, if any, are undone
            self._losses.forget()
        elif listed is not None and answer.mode is not MergeMode.SHIFT:
            self._base = Mark(self._base.steps + listed.steps, self._base.tokens + listed.tokens)

    @property
    def _is_local(self) -> bool:
        """Whether the steps after the base are this site's own, with optimizers of the nodes."""
        return len(self._of_node) > 0 and self._connection.settings.sync.phases.is_local(self._base_commit + 1)

    def _begin_anew(self) -> None:
        """What was handed in held no tokens, and is released: the next steps are the base's first ones again, with the
        rates that a script has for them."""
        self._base = Mark(self._steps, self._tokens)
        self._listed.clear()
        self._left_out.forget()
        if self._is_local:
            self._shared.undo_steps()
            self._begin_window()

    def _begin_window(self) -> None:
        """The parameters have the values of the base. Where the nodes do the steps, these are of it."""
        settings, commit = self._connection.settings, self._base_commit
        self._left_out.forget()
        start: WindowStart | None = None
        if self._is_local:
            start = WindowStart.on(settings, commit, self._base_run_step, self._shared.moments)
        for optimizer in self._of_node:
            optimizer.at_commit(commit, start)

    def _mean_loss(self) -> float | None:
        """Of the window. Raises NonFiniteError."""
        try:
            return self._losses.take(self._tensors.held)
        except SpoiledError:
            if self._checkpoints is not None:
                self._checkpoints.discard()
            raise

    def _apply(self, answer: Answer) -> None:
        is_restored = self._restored_step is not None and self._steps == 0
        with self._checks.update(answer.fragment, is_restored=is_restored) as copies:
            self._shared.apply(answer.fragment, answer.mode, fresh=answer.fresh, copies_of=copies)
        known_step = self._restored_step if answer.fresh else self.inner_step  # the optimizers know the run up to there
        self._note_base(answer)
        self._losses.took_commit()
        self._base_run_step, self._base_run_tokens = answer.run_step, answer.run_tokens
        self._run_length = answer.run_length
        if answer.num_sites:
            self._among = AmongSites(answer.site_index, answer.num_sites)
        self._base_commit = answer.version
        self._begin_window()
        self._taken[answer.fragment] = answer.mode, self._steps
        self._data_epoch = answer.data_epoch
        if self._batches is not None:
            self._batches.begin_epoch(answer.data_epoch)
        num_missed = math.inf if known_step is None else answer.run_step - known_step
        if self._ramp_steps and answer.run_step > 0 and num_missed > self._ramp_steps:
            if self._ramp is not None:
                self._ramp.remove()
            self._ramp = LearningRateRamp(self._optimizers, self._ramp_steps)
        self._client.merged(version=answer.version, step=self._steps, wait_s=self._wait_s)
        self._wait_s = 0.0
