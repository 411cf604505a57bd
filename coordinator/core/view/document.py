"""The run as people see it: status page, `atoll status`, metrics. JSON through `dataclasses.asdict`, and back through
`strict.build`. Whoever shows a run uses these classes. Pure, and imports nothing of the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.figures import Figures, Readings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedView:
    """What a script of the site logged last by that name."""

    name: str
    of_outer: bool
    """Of the outer parameters; else of the site's own."""
    step: int
    """Of the run."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView(Figures):
    site_id: int
    name: str
    address: str
    endpoints: tuple[str, ...] = ()
    """Addresses of the site's other hosts."""
    incarnation: int
    state: str
    """In words: its kind, and of a site that has gone the reason."""
    state_kind: str
    """starting, making the starting state, fetching state, catching up, member, away or gone."""
    connected: bool
    phase: str
    """As the node says it."""
    loss: float | None
    """None before the first step, and of a script that gives none."""
    utilization: float | None
    """train_s / (train_s + wait_s): share of time not waiting for a sync; None before the first step."""
    last_commit: int | None
    """What it holds, or held when it went; None if nothing."""
    state_hash: str
    """Hexadecimal; empty if it holds no state."""
    num_wrong_states: int
    """How often its state was not the run's, so that it had to be repaired; since this start of the coordinator."""
    snapshot_s: float
    """Its ranks wrote snapshots for syncs whose result they took; since this start of the coordinator."""
    silent_s: float
    """Since its last message."""
    doing: str
    """What its workers do, as the node says it; empty while they wait."""
    not_dialled_by: tuple[str, ...]
    """Sites that cannot connect to its address; it reduces nothing for them."""
    up_bytes_per_s: float | None
    """To one of the others while it sends to all of them, as most of them say; None if that is not known."""
    down_bytes_per_s: float | None
    """The same of what it receives."""
    contributes_every: int
    """Syncs: 1, or more where its link is thin, and it rests in the others."""
    extra_s: float
    """By so much its link makes a sync longer in which it contributes, as far as that is known."""
    norm: float | None
    """Of its last contribution, as the reducers say; None if that is not known. So is the next one."""
    cosine: float | None
    """To the average, of its last contribution that was looked at closer, in a sample."""
    influence: float | None
    """Its share of the last commit's averages, where these are by influence and it contributed."""
    telemetry: Readings
    """What it measured last; zeros until it said so."""
    has_told: bool
    """It said so, since this start of the coordinator."""
    high_in_a_row: int
    """Contributions in a row whose norm was more than `sync.clip` times the median."""
    logged: tuple[LoggedView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    sender: str
    receiver: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncView:
    sync: int
    base_commit: int
    num_steps: int
    attempt: int
    """0 while it is collected."""
    fragment: str
    """In words, such as "0 of 4" or "all"; empty in a run with one."""
    wait: str
    """What it waits for, in words."""
    ready: tuple[str, ...]
    contributors: tuple[str, ...]
    receivers: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitView:
    commit: int
    sync: int
    attempt: int
    run_step: int
    run_tokens: int
    tokens: int
    contributors: tuple[str, ...]
    mean_loss: float | None
    """Weighted by tokens."""
    median_loss: float | None
    """The run's: no single site can falsify it."""
    cut: tuple[str, ...]
    """Whose weights are less than what their sites said, in words."""
    state_hash: str
    """Hexadecimal; empty until it is attested."""
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BestView:
    """A saved model, and what was logged of it."""

    commit: int
    run_step: int
    site: str
    """Whose word it is."""
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedView:
    site: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassView:
    number: int
    """From 0 on."""
    num_done: int
    num_leased: int
    num_open: int
    leased: tuple[LeasedView, ...]
    """What is in flight, by site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineView:
    line: int
    site: str
    """Whose line it is; empty for the one that all sites share."""
    num_samples: int
    """Of one pass."""
    num_passes_begun: int
    num_passes_done: int
    """The first so many passes are done as a whole."""
    num_done: int
    """Of all passes that were begun, as the next two; together they are `num_passes_begun * num_samples`."""
    num_leased: int
    num_open: int
    passes: tuple[PassView, ...]
    """From the first one that is not done on; the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeView:
    line: int
    first: int
    num_samples: int
    state: str
    """done, leased or open."""
    site: str
    """That leases it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    site: str
    """Its name."""
    name: str
    """What its script calls it; `training loss` at each commit."""
    of_outer: bool
    points: tuple[tuple[int, int, float, float], ...]
    """(run_step, run_tokens of the newest commit at that moment, seconds since 1970, value), thinned out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    run_id: str
    state: str
    """In words, see `state_in_words`."""
    state_kind: str
    """The first word of it: waiting, training, syncing, paused or finished."""
    term: int
    started: bool
    finished: bool
    last_commit: int
    run_step: int
    run_tokens: int
    steps: int
    """Length of the run; 0 if `tokens` says it."""
    tokens: int
    changed: str
    """Settings that are not as the run began, in words; empty if all are."""
    sync_every: int
    """Steps: where sites do more and more by themselves, those of the next sync."""
    codec: str
    robust: str
    """What becomes of contributions with high norms: off, warn, clip, trim or gram."""
    contribution_bytes: int
    """The most that a site sends for one sync of the whole model; 0 before there is a model."""
    average_share: float | None
    """Of the last commit that was looked at closer: the norm of the average over the mean of the contributions'; None
    if that is not known. So are the next two."""
    last_cosine: float | None
    """Of the average to the one before: near 1 they go one way, and below 0 momentum is too high."""
    codec_error: float | None
    """What the codec loses of a contribution, relative to it."""
    num_parameters: int
    state_hash: str
    """Of the newest attested commit, hexadecimal."""
    attested_commit: int | None
    num_attempts: int
    """Plans since this start of the coordinator; so are the next four."""
    num_evicted: int
    evictions: tuple[tuple[str, int], ...]
    """The same by cause: absence, hang, state, contribution, contradiction, audit, memory or operator."""
    num_not_finite: int
    """Times that a site's loss stopped being a number."""
    num_failed: int
    """Sites that left because they cannot go on."""
    num_wrong_states: int
    num_refused: int
    num_malformed: int
    num_abandoned: int
    """Of the whole run."""
    branch: int
    """How often the run was rolled back."""
    unreachable: str
    """Why nobody who is here can reach the newest commit, and who may; empty if somebody can."""
    banned: tuple[str, ...]
    """Sites that a person does not want in the run: name and reason."""
    errors: tuple[str, ...]
    """Why sites left for good that are not in the run again, the newest last."""
    excluded: tuple[str, ...]
    """The newest contributions that were left out of a sync, and why, ascending."""
    high: tuple[str, ...]
    """Sites whose contributions are larger than the others' again and again, or zero, in words."""
    audits: int = 0
    """Chunks of each commit that are averaged once more."""
    num_audits_right: int = 0
    """Since this start of the coordinator, audits that found nothing; so are the next three."""
    num_audits_wrong: int = 0
    """That ended with a site that was found out."""
    num_audits_unknown: int = 0
    """Of which no site could tell how they end."""
    best: BestView | None = None
    """The saved model that is the best so far."""
    best_in_vain: str = ""
    """Why what scripts log of late chooses none, in words; empty where it does."""
    audit_silence: tuple[str, ...] = ()
    """Sites that did not give what audits asked them for, in words."""
    same_samples: tuple[str, ...] = ()
    """Sites that train what another one trains, in words."""
    codec_up: str = ""
    """Of contributions; `bf16+sign1` where some syncs of the run have one codec and some the other."""
    codec_down: str = ""
    """The same of their averages; `bundle` where sites average by themselves."""
    too_many_bundled: str = ""
    """Why so many sites had better have another codec, in words; empty where they had not."""
    store_stuck_s: float = 0.0
    """How long the store has kept a decision waiting, all the rest being of before; the shell says it."""
    syncs: tuple[SyncView, ...]
    """That are open, in the order of their windows."""
    sites: tuple[SiteView, ...]
    """Who is here, the first of those at the door, then the last of those that have gone."""
    slow_links: tuple[LinkView, ...]
    """Of sites whose links are slower than those of most: the slowest of them, ascending."""
    num_at_the_door: int
    """Sites that have said Hello and were never in the run: their workers start, or they want nothing."""
    num_gone: int
    """Sites that were in the run and are not; those that never contributed are forgotten in time."""
    commits: tuple[CommitView, ...]
    """The newest, ascending."""
    data: tuple[LineView, ...]
    """The account of samples; empty if no site has asked for any."""
    losses: tuple[tuple[int, int, int, float], ...]
    """(commit, run_step, run_tokens, median loss) of the whole run, thinned out when it is long."""
