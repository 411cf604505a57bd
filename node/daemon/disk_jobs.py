"""What works on the outer state, the payload log and PUBLISH: the core's jobs, and what the coordinator asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from math import inf

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import newest
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon.hosts.replicas import Replicas
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.shell import Shell, fatal
from atoll.node.dataplane import false_payload
from atoll.node.dataplane.kept_contributions import Kept, KeptContributions, own_places
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.audited_errors import AuditedErrors
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, InvalidMessage, NonFiniteError, PeerError, StateError
from atoll.protocol.payload_lists import listed
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.trust.words import of_contributions

log = logging.getLogger(__name__)
SAY_EVERY_S = 1.0
"""Of commits that are applied, where there are many."""


class DiskJobs:
    """`plane` is None until one was found on the disk, or the workers have said what their model is."""

    def __init__(self, shell: Shell, plane: DataPlane | None) -> None:
        self.plane = plane
        self._shell = shell
        self._core = shell.core
        self._fetch: asyncio.Task[None] | None = None
        self._sources: asyncio.Future[m.Sources] | None = None  # wanted by the fetch
        self._said_at = -inf  # that a commit is applied
        self.kept: KeptContributions | None = None  # in a run with audits, what this site contributed last
        self._auditor: Auditor | None = None  # the same, once it is asked
        if plane is not None:
            outer = self._core.site.disk.outer
            self._replicas.serve(plane, None if outer is None else (outer.commit, outer.state_hash))

    async def attach(self, pieces: SitePieces) -> DataPlane:
        """With shared buffers for these workers; peers are served from it. Raises atoll's errors and OSError."""
        self.plane = plane = await run_to_its_end(partial(self._attached, self.plane, pieces))
        elsewhere = self._shell.leader.kept_elsewhere.client
        self._shell.hub.serve(plane.layout, lambda: plane.outer, plane.log, self._pace, self.kept, elsewhere=elsewhere)
        self._replicas.serve(plane, None)
        self._shell.processes.lay_out(plane)
        return plane

    @property
    def num_written(self) -> int:
        """Records of the outer state and of error feedback, in this start."""
        kept = (self.plane.outer, self.plane.errors) if self.plane is not None else ()
        return sum(each.store.num_ended for each in kept if each is not None)

    @property
    def _replicas(self) -> Replicas:
        """Of the other hosts of the site."""
        return self._shell.leader.replicas

    def _attached(self, plane: DataPlane | None, pieces: SitePieces) -> DataPlane:
        """In a thread: as much memory as the model takes is allocated, and files of an earlier start are read."""
        shell, settings = self._shell, self._core.settings
        if plane is None:
            plane = shell.parts.data_plane(shell.home, settings, pieces.manifest, shell.config.num_kernel_threads)
        if plane.layout.manifest.digest != pieces.manifest.digest:
            raise InvalidMessage(
                f"{self._shell.home.folder} holds the state of another model; choose another folder with --home"
            )
        if settings.sync.audits and self.kept is None:
            self.kept = KeptContributions(shell.home.kept_folder, settings.sync.num_kept_syncs)
            if settings.sync.error_feedback_down:
                shell.hub.average_errors.audited = AuditedErrors(settings.sync.most_in_flight)
        plane.divide(0, shell.config.site_hosts, shell.config.exchange_processes)
        plane.attach_workers(pieces.dtypes, read_in_place=pieces.reads_in_place)
        return plane

    @property
    def present(self) -> DataPlane:
        """What needs one is asked for when there is one."""
        assert self.plane is not None
        return self.plane

    @property
    def auditor(self) -> Auditor:
        """Asked for in a run with audits alone. Raises InvalidMessage."""
        if (kept := self.kept) is None:
            raise InvalidMessage("an audit in a run without them")
        if self._auditor is None:
            plane, hub = self.present, self._shell.hub
            self._auditor = Auditor(
                settings=plane.settings,
                layout=plane.layout,
                log=plane.log,
                kept=kept,
                elsewhere=self._shell.leader.kept_elsewhere.client,
                errors=hub.average_errors,
                header=hub.identity,
                dialer=hub.dialer,
                expected=hub.expected_donors,
                undialable=lambda: self._core.site.unreachable_site_ids,
                counters=hub.counters,
                pace=self._pace,
                pool=hub.pool,
                words=self._shell.words,
                keep_evidence=partial(false_payload.keep, self._shell.home.evidence_folder, disk=self._shell.home.disk),
            )
        return self._auditor

    @property
    def _pace(self) -> Pace:
        limits = self._core.limits
        return Pace(stall_s=limits.stall_s, slowest_bytes_per_s=limits.slowest_bytes_per_s)

    def close(self) -> None:
        if self.plane is not None:
            self.plane.close()

    # --- jobs

    def execute(self, output: out.Output) -> None:
        """Begin it; an event ends it."""
        match output:
            case out.SeedState():
                self._shell.start(self._seed, fatal("the starting state: "))
            case out.FetchState(sources):
                fetch = partial(self._fetched, sources)
                self._fetch = self._shell.start(fetch, lambda error: e.FetchFailed(str(error), self._has_moved))
            case out.TellFetch(sources):
                if self._sources is not None and not self._sources.done():
                    self._sources.set_result(sources)
            case out.CancelFetch():
                if self._fetch is not None:
                    self._fetch.cancel()
            case out.AdvanceErrors():
                self._shell.start(
                    partial(self._advance_errors, output), lambda error: e.ErrorsAdvanced(str(error) or repr(error))
                )
            case out.ApplyCommit(commit, lets_go):
                apply, number = partial(self._apply, commit, lets_go=lets_go), commit.commit
                self._shell.start(apply, lambda error: e.ApplyFailed(number, str(error), self._has_moved))
            case out.PublishState(content):
                self._shell.start(partial(self._publish, content), fatal())
            case out.DistrustState(reason):
                log.warning("checking every chunk in %s: %s", self._shell.home.state_folder, reason)
                self._shell.start(self._distrust, fatal())
            case out.RollBack(last, branch):
                self._shell.start(partial(self._roll_back, last, branch), fatal())

    async def _seed(self) -> e.Event:
        state_hash = await self.present.seed(self._shell.config.from_saved)
        if self.present.snapshot_is_due:  # before anybody counts on it: there is no other copy
            await self.present.write_snapshot()
        self._replicas.moved((0, state_hash))
        return e.StateSeeded(state_hash=state_hash)

    async def _fetched(self, sources: m.Sources) -> e.Event:
        plane = self.present
        async with self._replicas.fetching() as outer:
            fetched = await self._shell.hub.fetch_state(
                sources=sources,
                refresh=self._ask_for_sources,
                undialable=lambda: self._core.site.unreachable_site_ids,
                outer=outer,
                log=plane.log,
                optimizer=plane.optimizer,
                pace=self._pace,
            )
        self._snapshot_if_due()
        self._replicas.moved((fetched.commit, fetched.state_hash))
        self._look_at_pace(fetched.commit - newest(sources), plane.log.num_kept)
        record = fetched.record
        return e.StateFetched(
            commit=fetched.commit,
            state_hash=fetched.state_hash,
            run_step=record.run_step if record else 0,
            run_tokens=record.run_tokens if record else 0,
            final=record is not None and record.final,
            touched=plane.log.history.touched(fetched.commit) or (),
        )

    def _look_at_pace(self, num_commits: int, kept: int) -> None:
        """So many were made while the state was fetched: it is brought up to them by the payloads in the logs."""
        if 2 * num_commits > kept:
            log.warning(
                "the run made %d commits while this site fetched its state, and sites keep the payloads of %d "
                "(sync.log_commits): a site with half of this link would not catch up; begin runs with more",
                num_commits, kept,
            )  # fmt: skip

    @property
    def _has_moved(self) -> bool:
        """What broke off has left the disk at another commit than the core knows, or at none."""
        held, plane = self._core.site.disk.outer, self.plane
        if held is None or plane is None:
            return False
        return plane.outer is None or plane.outer.commit != held.commit

    async def _ask_for_sources(self, undialled: tuple[int, ...]) -> m.Sources:
        """What has changed at the coordinator while a fetch is under way; these donors are to dial this site."""
        if not self._core.site.welcomed:
            raise PeerError("there is no coordinator to ask who has the state")
        commit = self.present.outer.commit if self.present.outer is not None else None
        self._sources = asyncio.get_running_loop().create_future()
        self._shell.handle(e.SourcesWanted(held=commit, undialled_site_ids=undialled))
        try:
            async with asyncio.timeout(self._core.limits.lease_s):
                return await self._sources
        except TimeoutError:
            raise PeerError("the coordinator does not say who has the state") from None
        finally:
            self._sources = None

    async def keep_contributions(self, job: out.KeepContributions) -> e.Event | None:
        """What this site is ready with, in a run with audits. Without its base, or all hosts, it is of no use any more;
        of a snapshot that was given up meanwhile nothing is said."""
        lane = self._core.site.lanes[job.fragment]
        of = lane.snapshot.generation, lane.snapshot.step, lane.snapshot.seq

        def is_wanted() -> bool:
            now = lane.snapshot
            return now.kept_for == job.sync and (now.generation, now.step, now.seq) == of

        try:
            kept = await self._keep(job, is_wanted)
        except StateError as error:
            log.info("sync %d: what this site would contribute is void: %s", job.sync, error)
            return e.ContributionsKept(job.sync, job.fragment, b"") if is_wanted() else None
        except NonFiniteError as error:
            return e.NodeFailed(str(error), error.exit_code)
        signature, words = None, self._shell.words
        if words is not None:
            word = of_contributions(words.run_id, job.sync, self._shell.start_of_site, kept.root)
            signature = words.signed(word)
        return e.ContributionsKept(job.sync, job.fragment, kept.root, signature) if is_wanted() else None

    async def _keep(self, job: out.KeepContributions, is_wanted: Callable[[], bool]) -> Kept:
        """By all hosts of the site. Raises StateError, NonFiniteError."""
        assert self.kept is not None, "asked for in a run with audits"
        plane = self.present
        data = plane.sync_data(job.base_commit, job.fragment, job.error_commits)
        encode, pool = data.contribution_on_base, self._shell.hub.pool
        of_hosts = asyncio.ensure_future(self._replicas.keep(job, is_wanted))
        try:
            kept = await run_to_its_end(partial(self.kept.keep, job.sync, data.chunks, encode, pool, plane.own))
            said = await of_hosts
        finally:
            of_hosts.cancel()
        if said.by:
            await said.put_together(kept.tree, [own_places(data.chunks, own) for own in plane.of_hosts])
        return kept

    async def _advance_errors(self, job: out.AdvanceErrors) -> e.Event:
        plane = self.present
        data = plane.sync_data(job.base_commit, job.fragment, job.error_commits, plane.own)
        of_hosts = asyncio.ensure_future(self._replicas.advance_errors(job))
        try:
            share = await plane.advance_errors(job.commit, data)
            said = await of_hosts
        finally:
            of_hosts.cancel()
        if problem := next((found for found in said if found), ""):
            return e.ErrorsAdvanced(problem)
        return e.ErrorsAdvanced(share=share)

    async def _apply(self, commit: m.Commit, *, lets_go: bool) -> e.Event:
        loop = asyncio.get_running_loop()
        started = loop.time()
        state_hash = await self._replicas.apply(commit, lets_go=lets_go)
        self._shell.observer.apply_s = loop.time() - started
        often = self._core.settings.sync.steps_at_nodes and started < self._said_at + SAY_EVERY_S
        if not often:
            self._said_at = started
        level, words = logging.DEBUG if often else logging.INFO, self._shell.observer.last_sync()
        log.log(level, "commit %d: step %d, %s", commit.commit, commit.run_step, words)
        self._snapshot_if_due()
        return e.CommitApplied(commit=commit.commit, state_hash=state_hash)

    def _snapshot_if_due(self) -> None:
        if self.present.snapshot_is_due:
            self._shell.start(self.present.write_snapshot, fatal("a snapshot: "))

    async def _publish(self, content: e.Content) -> e.Event:
        leader = self._shell.leader
        ranks = leader.ranks  # a publish for those before is of no use to those who follow
        await self.present.publish(content)
        await leader.publish(ranks, content)
        return e.Published(content)

    async def _distrust(self) -> e.Event:
        damaged = await self.plane.distrust() if self.plane is not None else []
        log.info("%d chunks are damaged; the others are compared with those of the other sites", len(damaged))
        return e.StateVerified()

    async def _roll_back(self, commit: int, branch: int) -> e.Event:
        held = await self.plane.roll_back(commit) if self.plane is not None else None
        await run_to_its_end(partial(self._shell.home.keep_branch, branch))
        self._replicas.roll_back(commit, branch, held)
        return e.DiskRolledBack(branch=branch, held=held)

    # --- what others ask for, beside the jobs

    def drop_payloads(self, sync: int) -> None:
        """Of a sync that is over."""
        if self.plane is not None:
            drop = partial(self.plane.log.drop, sync)
            self._shell.start(lambda: run_to_its_end(drop), fatal())

    async def list_payloads(self, plan: m.Plan) -> e.Event | None:
        """Their hashes, as they are in the log."""
        sync, term, attempt = plan.sync, plan.term, plan.attempt
        held = self.present.log

        def all_of_them() -> bytes:
            return listed(held.hashes(sync, term, attempt), plan.trees)

        try:
            hashes = await run_to_its_end(all_of_them)
        except StateError as error:
            log.warning("%s", error)  # the sync is over meanwhile
            return None
        return e.Fulfilled(m.PayloadList(sync=sync, attempt=attempt, term=term, hashes=hashes))

    async def show(self, asked: m.Show) -> e.Event:
        """One part of what settles a dispute. What is not here, or cannot be read, may be at another site."""
        data, text = b"", "it holds no state"
        try:
            if self.plane is not None:
                data = await self.plane.show(asked.evidence, asked.commit, asked.chunk)
        except (AtollError, OSError) as error:
            text = str(error)
        shown = m.Shown(
            commit=asked.commit,
            evidence=asked.evidence,
            chunk=asked.chunk,
            first_byte=asked.first_byte,
            total_bytes=len(data),
            data=data[asked.first_byte : asked.first_byte + m.EVIDENCE_PART_BYTES],
            text="" if data else text[:1024],
        )
        return e.Fulfilled(shown)

    async def rebuild(self, asked: m.RebuildCommit) -> e.Event:
        """The state at an older commit, beside the one that is held: the run is to go back to it. A site without room
        for it, or with a damaged log, goes on with what it holds."""
        commit, state_hash, text = asked.commit, b"", ""
        try:
            state_hash = await self.present.put_aside(commit, asked.state_hash, asked.last_commit)
            log.info("commit %d is on this disk, with hash %s", commit, state_hash.hex()[:12])
        except (AtollError, OSError) as error:
            text = str(error)
            log.warning("commit %d cannot be put together here: %s", commit, text)
        oldest = await run_to_its_end(self.present.oldest)
        rebuilt = m.CommitRebuilt(
            commit=commit,
            state_hash=state_hash,
            has_oldest=oldest is not None,
            oldest_commit=oldest or 0,
            text=text[:1024],
        )
        return e.Fulfilled(rebuilt)
