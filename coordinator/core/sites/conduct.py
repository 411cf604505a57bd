"""What is held against a site that costs the run time without contributing to it. Pure.

A stranger may join, say what an honest site says, and never exchange a byte; it may come back each time that it is
found out. So what counts is not what a site says of itself but what the coordinator sees: commits that it contributes
to, and attempts that it cost. Each time that it is found out is a strike. With every strike it stays away for longer,
and with the last one for good. An honest site that had a bad hour contributes again, and its strikes are forgiven.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from atoll.coordinator.core.events import SiteRecord

WAIT_LEASES = (0, 0, 16, 64, 256)
"""Of each strike: so many leases until the site is admitted again. The first may be an accident of the network. With
the one after the last it is banned, unless it is found out for its absence alone."""
FAULT_COMMITS = 1000
MAX_FAULTS = 2
"""Within so many commits: flipped bits that a site owned up to. With the next one it is banned. An audit finds few of
those that there are, and a liar may own up too."""
FORGIVEN_LEASES = 64
"""A strike is forgiven when the site has contributed for so long since: time, because a commit may take hours."""


class Cause(Enum):
    """Why a site is sent out of the run; the value is for people and metrics."""

    ABSENCE = "absence"
    HANG = "hang"
    """It gets no further, though it is here."""
    STATE = "state"
    """What it holds is not the run's, or it does not show it."""
    CONTRIBUTION = "contribution"
    CONTRADICTION = "contradiction"
    """It says what cannot be."""
    AUDIT = "audit"
    """What it averaged, or found in an audit, is not what comes out at two other sites."""
    MEMORY = "memory"
    """The same, and its own computation shows it too: a bit flipped."""
    SILENCE = "silence"
    """As a reducer it gives auditors nothing of what it added to its averages."""
    OPERATOR = "operator"


@dataclass(slots=True)
class Conduct:
    strikes: int = 0
    offences: int = 0  # times that audits found it out; they are not forgiven with time
    faults: tuple[int, ...] = ()  # commits by which it owned up to what an audit had found, of the last FAULT_COMMITS
    silences: tuple[int, ...] = ()  # commits by which it had given auditors nothing, of the last FAULT_COMMITS
    judged_to: int = -1  # the newest commit when one last did
    admitted_again_at: float = 0.0
    has_contributed: bool = False  # since it was admitted
    _has_ever_contributed: bool = False
    _good_since: float = 0.0  # its first contribution since the last strike or pardon

    @property
    def is_held_against(self) -> bool:
        """Something is."""
        return bool(self.strikes or self.offences or self.faults or self.silences)

    @property
    def is_on_trial(self) -> bool:
        """It has been found out, and not contributed since: nobody waits for it."""
        return self.strikes > 0 and not self.has_contributed

    @property
    def may_reduce(self) -> bool:
        """It has shown that it exchanges, before others depend on it."""
        return self._has_ever_contributed and not self.is_on_trial

    @property
    def is_enough(self) -> bool:
        """It is to be banned."""
        return self.strikes > len(WAIT_LEASES)

    @property
    def is_second_offence(self) -> bool:
        """A first one may be a flipped bit."""
        return self.offences > 1

    @property
    def has_too_many_faults(self) -> bool:
        """Its memory is of no use to the run, or it lies and owns up each time."""
        return len(self.faults) > MAX_FAULTS

    @property
    def is_silent_too_often(self) -> bool:
        """It hides what it adds to its averages, whatever the reason is."""
        return len(self.silences) > MAX_FAULTS

    def offend(self, commit: int, newest: int) -> bool:
        """An audit of that commit has found it out. False if it was found out since that was made: what was wrong with
        it then may have spoiled several chunks."""
        if is_new := self._is_judged(commit, newest):
            self.offences += 1
        return is_new

    def own_up(self, commit: int, newest: int) -> bool:
        """The same, and its own computation gives what that of others does."""
        if is_new := self._is_judged(commit, newest):
            self.faults = (*(c for c in self.faults if c > newest - FAULT_COMMITS), newest)
        return is_new

    def withhold(self, commit: int, newest: int) -> bool:
        """The same, and what it may have done is not known, as it keeps silent."""
        if is_new := self._is_judged(commit, newest):
            self.silences = (*(c for c in self.silences if c > newest - FAULT_COMMITS), newest)
        return is_new

    def _is_judged(self, commit: int, newest: int) -> bool:
        if commit <= self.judged_to:
            return False
        self.judged_to = max(commit, newest)  # the commit itself may be void by now
        self.has_contributed = False
        return True

    def pardoned(self, newest: int) -> Conduct:
        """Nothing is held against it, nor what an audit finds of a commit up to the newest one."""
        return Conduct(judged_to=newest, _has_ever_contributed=self._has_ever_contributed)

    def went_back(self, commit: int) -> bool:
        """The run did: later numbers are those of other commits from now on. Whether that changes anything."""
        is_later = self.judged_to > commit
        self.judged_to = min(self.judged_to, commit)
        return is_later

    def strike(self, now: float, lease_s: float, *, is_absence: bool = False) -> None:
        """`is_absence`: it may be the network's doing, and keeps nobody out for good."""
        if not is_absence or self.strikes < len(WAIT_LEASES):
            self.strikes += 1
        self.has_contributed = False
        self.admitted_again_at = now + self._wait_s(lease_s)

    def _wait_s(self, lease_s: float) -> float:
        return WAIT_LEASES[min(self.strikes, len(WAIT_LEASES)) - 1] * lease_s if self.strikes else 0.0

    def left(self) -> None:
        """It has to contribute again before others wait for it."""
        self.has_contributed = False

    def restored(self, record: SiteRecord, *, now: float, lease_s: float) -> None:
        """What the store knows of it when the coordinator is started again. Clocks of two starts are not compared: a
        site that is to stay away does so for its whole time from now on."""
        self._has_ever_contributed, self.has_contributed = record.contributed, record.has_contributed
        self.strikes, self._good_since = record.strikes, now
        self.offences = record.offences
        self.faults = record.faults
        self.silences = record.silences
        self.judged_to = record.judged_to
        if not record.live:
            self.admitted_again_at = now + self._wait_s(lease_s)

    def contributed(self, now: float, lease_s: float) -> None:
        """To a commit."""
        self._has_ever_contributed = True
        if not self.has_contributed:
            self.has_contributed, self._good_since = True, now
        if self.strikes and now - self._good_since >= FORGIVEN_LEASES * lease_s:
            self.strikes, self._good_since = self.strikes - 1, now
