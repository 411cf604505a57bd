"""What is right and wrong with this machine for a run, one finding a line: measured figures in, words and remedies out.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from atoll.protocol.dates import utc
from atoll.protocol.file_systems import IN_MEMORY, NETWORK
from atoll.protocol.text import byte_count

if TYPE_CHECKING:
    from atoll.protocol.measuring import Speed

CLOCK_WARN_S = 5.0
CLOCK_FAIL_S = 3600.0
"""Certificates are valid from an hour before they were made."""
FAR_S = 0.03
"""A round trip from which on Linux' slow start after idle costs a sync much: docs/decisions/0038."""
SLOW_DISK_BYTES_PER_S = 50e6
FEW_DESCRIPTORS = 1024
SHORT_DISK = 1.2
"""Free room over what the run needs."""
DAY_S = 86_400


class Verdict(Enum):
    """The value is what people see."""

    OK = "ok"
    WARN = "!"
    FAIL = "FAILS"
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


def versions(own: str, coordinators: str) -> Finding:
    if own == coordinators:
        return Finding(Verdict.OK, "version", f"atoll {own}, as at the coordinator")
    remedy = "use the same version at all sites: another protocol version is refused"
    return Finding(Verdict.WARN, "version", f"atoll {own}; the coordinator has {coordinators}", remedy)


def coordinator(address: str, round_trip_s: float, slow_start: str) -> Finding:
    """`slow_start`: what net.ipv4.tcp_slow_start_after_idle says."""
    found = f"{address} answers in {1000 * round_trip_s:.0f} ms"
    if round_trip_s > FAR_S and slow_start == "1":
        remedy = "syncs begin slowly on this link: see deploy/sysctl.d, net.ipv4.tcp_slow_start_after_idle = 0"
        return Finding(Verdict.WARN, "coordinator", found, remedy)
    return Finding(Verdict.OK, "coordinator", found)


def clock(ahead_s: float, uncertain_s: float) -> Finding:
    """Of the coordinator's, to within `uncertain_s`."""
    off_s = max(0.0, abs(ahead_s) - uncertain_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"{abs(ahead_s):.1f} s {side} the coordinator's" if off_s > 0 else "as the coordinator's"
    remedy = "set the clock, by NTP (timedatectl set-ntp true)"
    if off_s > CLOCK_FAIL_S:
        return Finding(Verdict.FAIL, "clock", found, f"{remedy}: certificates are taken for invalid")
    return (
        Finding(Verdict.WARN, "clock", found, remedy) if off_s > CLOCK_WARN_S else Finding(Verdict.OK, "clock", found)
    )


def certificate(until_s: float, now_s: float) -> Finding:
    found, remedy = f"holds until {utc(until_s)}", "join with a new invite (atoll invite --site NAME)"
    if now_s > until_s:
        return Finding(Verdict.FAIL, "identity", f"has expired at {utc(until_s)}", remedy)
    verdict = Verdict.WARN if until_s - now_s < 30 * DAY_S else Verdict.OK
    return Finding(verdict, "identity", found, remedy if verdict is Verdict.WARN else "")


def disk(free_bytes: int, needed_bytes: int, more_bytes: int, home: str) -> Finding:
    """`free_bytes`: with the room that the home has already. `more_bytes`: that it may have beside the state."""
    found = (
        f"{byte_count(free_bytes)} free at {home}; the run needs {byte_count(needed_bytes)} there, and at the most "
        f"{byte_count(more_bytes)} for checkpoints, records and logs"
    )
    remedy = "make room, or choose another disk with --home"
    if free_bytes < needed_bytes:
        return Finding(Verdict.FAIL, "disk", found, remedy)
    short = free_bytes < SHORT_DISK * needed_bytes or free_bytes < needed_bytes + more_bytes
    return Finding(Verdict.WARN if short else Verdict.OK, "disk", found, remedy if short else "")


def disk_kind(file_system: str, home: str) -> Finding:
    if file_system in NETWORK:
        found = f"{home} is on a network file system ({file_system})"
        return Finding(Verdict.WARN, "disk kind", found, "put --home on a local disk: others' load becomes this site's")
    if file_system in IN_MEMORY:
        found = f"{home} is in memory ({file_system}): gone when the machine restarts, and memory that is never dropped"
        return Finding(Verdict.WARN, "disk kind", found, "put --home on a disk")
    return Finding(Verdict.OK, "disk kind", file_system or "not known")


def disk_speed(bytes_per_s: float, state_bytes: int) -> Finding:
    """Of a file that was written and synced. Each commit writes as much as a state."""
    took_s = state_bytes / bytes_per_s
    found = f"writes {byte_count(round(bytes_per_s))}/s: {took_s:.1f} s a commit of this run's model"
    if bytes_per_s < SLOW_DISK_BYTES_PER_S:
        return Finding(Verdict.WARN, "disk speed", found, "choose a faster disk with --home")
    return Finding(Verdict.OK, "disk speed", found)


def memory(free_bytes: int, needed_bytes: int, source: str, files_bytes: int = 0) -> Finding:
    """For the node; the workers' own comes on top. `files_bytes` of it: still to come in a home that is in memory."""
    what = "shares {} with its workers" if not files_bytes else f"needs {{}}, {byte_count(files_bytes)} of it for files"
    found = f"{byte_count(free_bytes)} free ({source}); the node {what.format(byte_count(needed_bytes))}"
    if free_bytes < needed_bytes:
        return Finding(Verdict.FAIL, "memory", found, "free memory, raise the limit, or train a smaller model")
    return Finding(Verdict.OK, "memory", found)


def descriptors(hard_limit: int) -> Finding:
    found = f"{hard_limit} file descriptors"
    if hard_limit < FEW_DESCRIPTORS:
        return Finding(Verdict.WARN, "limits", found, "raise the hard limit (ulimit -Hn, LimitNOFILE= of its unit)")
    return Finding(Verdict.OK, "limits", found)


def listens(address: str, problem: str) -> Finding:
    if problem:
        return Finding(Verdict.FAIL, "port", f"{address}: {problem}", "choose another --listen")
    return Finding(Verdict.OK, "port", f"{address} can be listened on")


def peer(name: str, address: str, connected_s: float | None) -> Finding:
    """`connected_s`: how long a connection took; None: there is none."""
    if connected_s is None:
        remedy = "is its port open from here? Without it the two exchange by connections that it makes"
        return Finding(Verdict.WARN, f"site {name}", f"cannot be dialled at {address}", remedy)
    return Finding(Verdict.OK, f"site {name}", f"{address} answers in {1000 * connected_s:.0f} ms")


def unknown(what: str, why: str) -> Finding:
    """It was not found out."""
    return Finding(Verdict.UNKNOWN, what, why)


def coordinators_link(speed: Speed) -> Finding:
    """Of which a run needs little."""
    return Finding(Verdict.OK, "link", f"to the coordinator {_in_words(speed)}")


def link(name: str, speed: Speed, contribution_bytes: int, slowest_bytes_per_s: int) -> Finding:
    """To that site, and what a sync sends on it at most (0: not known)."""
    found = _in_words(speed)
    if contribution_bytes:
        found += f"; a sync sends {byte_count(contribution_bytes)}: {contribution_bytes / speed.up_bytes_per_s:.1f} s"
    if _least(speed) < slowest_bytes_per_s:
        remedy = "the run takes such a link for one that hangs: is it this machine's, or that site's?"
        return Finding(Verdict.WARN, f"link to {name}", found, remedy)
    return Finding(Verdict.OK, f"link to {name}", found)


def all_links(speeds: Sequence[Speed], slowest_bytes_per_s: int) -> list[Finding]:
    """To the sites that were measured: nothing unless all are too slow."""
    fastest = max(map(_least, speeds))
    if fastest >= slowest_bytes_per_s:
        return []
    found = f"{_mbit(fastest)} at best; the run takes less than {_mbit(slowest_bytes_per_s)} for a link that hangs"
    return [Finding(Verdict.FAIL, "links", found, "use another link, or begin the run with time_limits = wan")]


def _least(speed: Speed) -> float:
    return min(speed.up_bytes_per_s, speed.down_bytes_per_s)


def _in_words(speed: Speed) -> str:
    ways = f"{_mbit(speed.up_bytes_per_s)} up, {_mbit(speed.down_bytes_per_s)} down"
    return f"{1000 * speed.round_trip_s:.1f} ms there and back, {ways}"


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.3g} Mbit/s"


def dialled_back(name: str, address: str, problem: str) -> Finding:
    """As that site says, which was asked to dial this machine there."""
    if problem:
        remedy = "open its port (atoll node --listen, --advertise), or take a relay (--relay): else it reduces less"
        return Finding(Verdict.WARN, "dial-back", f"{name} cannot reach {address}: {problem}", remedy)
    return Finding(Verdict.OK, "dial-back", f"{name} reaches {address}")


def is_dialled(not_dialled_by: Sequence[str]) -> Finding:
    """As others say of this site while its node runs."""
    if not_dialled_by:
        found = f"{', '.join(not_dialled_by)} cannot dial this site"
        remedy = "open its port (atoll node --listen, --advertise), or leave it: it dials them, and reduces less"
        return Finding(Verdict.WARN, "dial-back", found, remedy)
    return Finding(Verdict.OK, "dial-back", "others reach this site")


def gpus(names: Sequence[str], nccl: str, *, is_here: bool) -> Finding:
    """`names`: of those that torch finds. `is_here`: the machine has one, whether torch finds it or not."""
    if not names and not is_here:
        return Finding(Verdict.OK, "GPU", "none on this machine: its ranks train on CPUs")
    if not names:
        found = "torch finds none of this machine's: its ranks would train on CPUs"
        return Finding(Verdict.WARN, "GPU", found, "install torch for this machine's GPUs, and their driver")
    if len(names) > 1 and not nccl:
        return Finding(Verdict.FAIL, "GPU", f"{len(names)} x {names[0]}, torch without NCCL", "install torch with NCCL")
    return Finding(Verdict.OK, "GPU", f"{len(names)} x {names[0]}{f', NCCL {nccl}' if nccl else ''}")
