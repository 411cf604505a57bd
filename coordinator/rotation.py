"""Another root takes the place of the run's, in three steps of an operator, while the run goes on: it is trusted by
all, it signs, and the old one is trusted no more. Each is refused while it would cut somebody off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from atoll.coordinator import authority as roots
from atoll.coordinator.authority import Authority
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.events import (
    Answer,
    Asked,
    BanLiftedRecord,
    BanRecord,
    InviteForgottenRecord,
    InviteRecord,
    Record,
    RotateAsked,
)
from atoll.coordinator.lease import Leading
from atoll.coordinator.noting import refused
from atoll.coordinator.watchers import Known, Watchers
from atoll.protocol.dates import utc
from atoll.protocol.errors import AtollError
from atoll.protocol.trust.names import Kind, Subject

OF_BANS = BanRecord | BanLiftedRecord | InviteRecord | InviteForgottenRecord
STEPS = ("make", "sign", "retire")


class Rotation:
    """`ask`: the core. `here`: names of sites that are in the run. `leading`: of one of several that share the
    store."""

    def __init__(
        self,
        authority: Authority,
        watchers: Watchers,
        ask: Callable[[Asked], Awaitable[Answer]],
        here: Callable[[], list[str]],
        leading: Leading | None = None,
    ) -> None:
        self.watchers = watchers
        self._authority = authority
        self._ask = ask
        self._here = here
        self._leading = leading
        self._asking = asyncio.Lock()

    async def ask(self, asked: RotateAsked) -> Answer:
        """With what there is to say as what was found. The step is in the audit log before it is done."""
        authority = self._authority
        async with self._asking:
            if problem := self._problem(asked) or await self._lacking(asked):
                return await refused(self._ask, asked, problem)
            answer = await self._ask(replace(asked, since_s=authority.since_s))
            if answer.problem:
                return answer
            try:
                stage = await asyncio.to_thread(authority.after, asked.step)
                if self._leading is not None:
                    await self._leading.keep_stage(stage)
                await asyncio.to_thread(authority.follow, stage)
            except AtollError as error:
                return await refused(self._ask, asked, str(error), how="failed")
            for tell in authority.told:
                tell()
            self.watchers.changed()
            return replace(answer, found=answer.found if asked.step == "retire" else "")

    def kept(self, records: Sequence[Record]) -> None:
        """What is kept by now: others may be banned or replaced, or other tokens count. An invite that is made or used
        concerns its own name alone: a crowd that joins does not have all looked at each time."""
        if of_bans := [record for record in records if isinstance(record, OF_BANS)]:
            joined = {record.name for record in of_bans if isinstance(record, InviteRecord)}
            is_all = all(isinstance(record, InviteRecord) for record in of_bans)
            self.watchers.end_refused(joined if is_all else None)
            self.watchers.changed()

    def _problem(self, asked: RotateAsked) -> str:
        """Why that cannot be done now; empty if it can."""
        authority = self._authority
        if asked.step not in STEPS:
            return f"{asked.step!r} is no step of a rotation: {', '.join(STEPS)}"
        if asked.step == "make":
            in_progress = authority.has_next or authority.has_old
            return "a rotation has begun: `atoll rotate --sign`, then `--retire`, end it" if in_progress else ""
        if asked.step == "sign":
            if not authority.has_next:
                return "there is no next root: `atoll rotate` makes one"
            expected = {Subject(authority.run_id, Kind.SITE_IDENTITY, name) for name in self._here()}
            if (behind := self.watchers.behind(expected)) and not asked.at_once:
                return f"these do not trust the next root yet: {', '.join(behind)}; ask again, or say --now"
            return ""
        if not authority.has_old:
            return "no old root is trusted: `atoll rotate --sign` comes before"
        until_s = authority.since_s + roots.SESSION_LIFE.total_seconds()
        if authority.machine.wall_time() < until_s and not asked.at_once:
            return f"certificates of the old root are in use until {utc(until_s)}: ask again then, or say --now"
        return ""

    async def _lacking(self, asked: RotateAsked) -> str:
        """Why it cannot be done now: whoever stands by could not lead. Keys of roots go from machine to machine by a
        person alone, so the next one is made before all of that."""
        if self._leading is None:
            return ""
        authority = self._authority
        try:
            is_made = asked.step == "make"
            newest = await asyncio.to_thread(authority.make_next) if is_made else authority.stage.trusted[-1]
        except AtollError as error:
            return str(error)
        lacking = self._leading.lacking(newest)
        if not lacking or asked.at_once:
            return ""
        name = authority.name_of(newest)
        return (
            f"these stand by and have not the next root, {newest[:16]}: {', '.join(lacking)}; copy {name}.pem and "
            f"{name}.key of {authority.folder} into the folder of the root there, and ask again"
        )


def rotation_of(
    authority: Authority | None,
    core: Core,
    ask: Callable[[Asked], Awaitable[Answer]],
    watchers_of: Callable[[Callable[[], Known]], Watchers],
    *,
    coordinators: Callable[[], tuple[str, ...]],
    leading: Leading | None,
) -> Rotation | None:
    """Of a run that has certificates, with those who hear of it. `coordinators`: addresses of all that share the
    store."""
    if authority is None:
        return None
    watchers = watchers_of(lambda: Known(authority.roots, core.banned_names, coordinators(), tuple(core.token_ids)))
    if leading is not None:
        leading.told.append(watchers.changed)
    return Rotation(authority, watchers, ask, core.here, leading)
