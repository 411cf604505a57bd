"""The saved model of a site on its disk: written beside its place, then put in place or removed."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.daemon.shell import Shell, fatal
from atoll.node.dataplane import best_model, saved_model
from atoll.protocol.changed import settings_with
from atoll.protocol.settings import settings_to_json
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger(__name__)


class Models:
    """One at a time. What is not in place when the node ends, `drop` removes."""

    def __init__(self, shell: Shell, disk: DiskJobs) -> None:
        self.folder = shell.config.save_dir
        """Where it is asked for; None: below the home."""
        self._shell = shell
        self._disk = disk
        self._at_home = shell.home.folder / "model"
        self._written_to = self.folder or self._at_home
        self._lock = asyncio.Lock()
        self._is_beside = False
        self._kept: int | None = None
        self._void: int | None = None

    def execute(self, output: out.Output) -> None:
        """Begin it; an event ends a save, and putting it in place."""
        match output:
            case out.SaveModel():
                self._shell.start(partial(self._save, output), fatal("saving the model: "))
            case out.KeepModel(commit):
                self._shell.start(partial(self._keep, commit), fatal("saving the model: "))
            case out.DropModel(commit):
                self._void = commit
                self._shell.start(self.drop, fatal("removing a wrong model: "))

            case out.KeepBest(commit):
                self._shell.start(partial(self._keep_best, commit), fatal("keeping the best model: "))
            case out.DropBest(after):
                self._shell.start(partial(self._drop_best, after), fatal("removing a wrong model: "))

    async def _save(self, output: out.SaveModel) -> e.Event:
        folder, plane, core = self.folder, self._disk.present, self._shell.core
        info = {
            "run_step": output.run_step,
            "run_tokens": output.run_tokens,
            "settings": json.loads(settings_to_json(settings_with(core.settings, core.site.changed_json))),
            "site": self._shell.config.name,
        }
        trouble = ""
        # The state first: while an earlier model is put in place or removed the run goes on.
        async with plane.frozen(output.commit) as frozen, self._lock:
            self._written_to, self._is_beside = folder or self._at_home, True
            # Rather in another place than nowhere: the run may be over, and the other sites gone.
            why = await plane.save(frozen, self._written_to, info, self._at_home if folder else None)
            if why is not None:
                self._written_to = self._at_home
                place = f"the model of commit {output.commit} is in {self._at_home}"
                trouble = f"{place}, as --save could not be followed: {why}"
                log.error("%s", trouble)
        return e.ModelSaved(commit=output.commit, trouble=trouble)

    async def _keep(self, commit: int) -> e.Event:
        async with self._lock:
            self._is_beside = False  # if this fails it is left where it is, and that is said
            num_earlier = self._shell.core.settings.keep_models - 1
            await run_to_its_end(partial(saved_model.put_in_place, self._written_to, num_earlier))
            self._kept = commit
        log.info("saved the model of commit %d in %s", commit, self._written_to)
        return e.ModelKept(commit=commit)

    async def _keep_best(self, commit: int) -> None:
        async with self._lock:
            run_id = self._shell.core.settings.run_id
            place = await run_to_its_end(partial(best_model.keep, self._written_to, commit, run_id))
        if place is not None:
            log.info("the model of commit %d, the best so far, is in %s", commit, place)
        else:
            log.warning("the model of commit %d, the best so far, is none of those that this site has saved", commit)

    async def _drop_best(self, after: int) -> None:
        async with self._lock:
            run_id = self._shell.core.settings.run_id
            await run_to_its_end(partial(best_model.drop, self._written_to, after, run_id))

    async def drop(self) -> None:
        """What is written and not in place; and what is, if it turned out to be wrong."""
        async with self._lock:
            if self._is_beside:
                await run_to_its_end(partial(saved_model.discard, self._written_to))
                self._is_beside = False
            void, self._void = self._void, None  # once: another commit has that number later
            if void is not None and void == self._kept:
                await run_to_its_end(partial(saved_model.take_back, self._written_to))
                self._kept = None
