"""The settings of a run. They live at the coordinator and reach the nodes in Welcome. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.protocol.bounds import check_bounds, one_of, within
from atoll.protocol.codecs.table import BUNDLE, CODECS, DENSE, SPARSE
from atoll.protocol.errors import ConfigError, InvalidMessage, UnsupportedError
from atoll.protocol.layout import MAX_CHUNKS, MAX_FRAGMENTS
from atoll.protocol.messages import MAX_MEMBERS
from atoll.protocol.model_settings import ModelSettings, TrainerSettings, check_model
from atoll.protocol.outer_settings import OUTER_OPTIMIZERS, OuterSettings, check_outer
from atoll.protocol.strict import build, check
from atoll.protocol.time_limits import time_limits

LEASED_STEPS = 64
STRATEGIES = ("diloco", "gradient", "momentum")
MERGES = ("keep", "mix")
MEANS = ("senders", "all")
ROBUST = ("off", "warn", "clip", "trim")
MAX_TRIMMED_SITES = 64
MAX_TRIMMED_ELEMENTS = 1 << 26
"""To cut the highest and the lowest of each element a thread of a reducer holds a chunk of every site in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    strategy: str = one_of(STRATEGIES, "diloco")
    """diloco, gradient or momentum. diloco: sites train `every` steps by themselves, then average what these changed.
    gradient: they average the gradient of each step, and the nodes do the optimizer's step; `every` is 1. momentum: so
    they begin, and after `warmup_commits` they average their momenta instead, and Adam's variance stays as it is
    (1-bit Adam, arXiv 2102.02888)."""
    warmup_commits: int = within(0, 1 << 40, 0)
    """With strategy momentum: so many commits of gradients at first, in `warmup_codec`. The paper takes a sixth of a
    run."""
    warmup_codec: str = one_of(DENSE, "bf16")
    """How gradients and their averages travel in these commits."""
    every: int = within(1, 1 << 32, 20)
    """H: inner steps between two syncs."""
    overlap_steps: int = within(0, 1 << 32, 0)
    """tau: sites train on for at most so many steps while they exchange, and take the average at the first step at
    which it is there; 0: they wait for it at the boundary. At most `every`. More than every / fragments: the next
    fragments' syncs begin while the ones before are still under way."""
    merge: str = one_of(MERGES, "keep")
    """keep or mix: what becomes of the steps that were trained meanwhile. keep: they are added to the average. mix: the
    local copy and the average are mixed, with the weight `alpha` for the local copy (arXiv 2501.18512)."""
    alpha: float = within(0, 1, 0.0, open_high=True)
    """Weight of the local copy with merge = "mix", more than 0 and less than 1; 0 with "keep"."""
    fragments: int = within(1, MAX_FRAGMENTS, 1)
    """F: the model is synced in so many parts, one after the other, a sync every H/F steps: each parameter every H
    steps, over a link that carries an F-th of the bytes at a time (arXiv 2501.18512)."""
    pace: bool = True
    """With `overlap_steps`: what a site sends is spread over most of the time in which it trains on, so that a thin
    link is used evenly; else it is sent as fast as the link takes it."""
    codec: str = one_of(CODECS, "int8")
    """fp32, bf16, fp16, int8, int4, e3m0, int2, sign1, topk2 or dct1: how pseudo-gradients and their averages travel;
    docs/codecs.md says what each costs."""
    up: str = one_of(("", *CODECS), "")
    """The codec of pseudo-gradients alone, where it is another one; empty: `codec`."""
    down: str = one_of(("", *DENSE), "")
    """The codec of their averages alone, where it is another one; empty: `codec`. topk2 and dct1 have none: the
    pseudo-gradients themselves go to all sites."""
    mean_over: str = one_of(MEANS, "senders")
    """senders or all: with topk2 and dct1 each value is averaged over the sites that sent it (arXiv 2508.15706), or
    over all, as if the others had sent 0."""
    error_feedback: float = within(0, 1, 0.0)
    """beta: what the codec lost of a site's contribution, times beta, is added to its next one (arXiv 1901.09847); 0:
    it is lost. A site keeps 4 bytes a parameter for it."""
    error_feedback_down: float = within(0, 1, 0.0)
    """The same of the averages: what the codec lost of one, times beta, is added to the next one by the site that
    averages it, as long as that is the same site (two-sided error feedback, arXiv 2102.02888)."""
    robust: str = one_of(ROBUST, "warn")
    """off, warn, clip or trim: what becomes of contributions with high norms, above `clip` times the median of all
    sites'. warn: a site that has them again and again is named. clip: they are made as small as that. trim: of each
    element the `trim` highest and lowest are left out of the average (arXiv 1803.01498)."""
    clip: float = within(1, 1 << 20, 3.0)
    """Times the median norm of a chunk's contributions."""
    trim: int = within(1, MAX_TRIMMED_SITES // 2, 1)
    """Contributions on each side; fewer where that would leave none."""
    chunk_elements: int = within(1, 1 << 24, 1 << 20)
    """The most elements of a chunk, the unit that is sent, reduced, hashed and repaired: docs/protocol.md, "Chunks"."""
    max_chunks: int = within(1, MAX_CHUNKS, 1 << 18)
    """A model of more chunks is refused: up to 2.7e11 elements at the usual size of a chunk."""
    max_weight_ratio: int = within(2, 1 << 20, 16)
    """A site's tokens count up to so many times the pace of the median contributor; what is beyond has no weight."""
    max_tokens_per_sample: int = within(1, 1 << 40, 1 << 20)
    """Most tokens of one sample. A site that says more of the samples that it leases is refused."""
    log_commits: int = within(1, 4096, 32)
    """Payloads of this many commits stay on each site's disk."""
    snapshots: int = within(0, 64, 2)
    """Snapshots of the outer state that stay on each site's disk. They are taken every log_commits / (snapshots + 1)
    commits, so that the newest one and the log give the state back after a power cut; 0: none."""
    fsync: bool = False
    """Wait for the disk before Done and after each commit. Without it a process crash loses nothing; a power cut may
    take a site back by some commits, to its last snapshot at worst."""

    @property
    def codec_up(self) -> str:
        return self.up or self.codec

    @property
    def codec_down(self) -> str:
        """Or that they are bundled."""
        return BUNDLE if self.codec_up in SPARSE else self.down or self.codec

    @property
    def all_fragments(self) -> int:
        """What a sync of all fragments names in place of one."""
        return self.fragments if self.fragments > 1 else 0

    def fragments_in(self, fragment: int) -> range:
        """Those that a sync of it covers."""
        return range(self.fragments) if fragment == self.fragments else range(fragment, fragment + 1)

    @property
    def most_in_flight(self) -> int:
        """Syncs, each of a fragment of its own, that are open at once: as many as begin within `overlap_steps`."""
        shortest = max(1, self.every // self.fragments)
        return max(1, min(self.fragments, -(-self.overlap_steps // shortest)))

    def window_steps(self, fragment: int) -> int:
        """Inner steps from the boundary before to that of a sync of the fragment: H in one cycle of all fragments. A
        sync of all at once has the steps of the longest window."""
        if fragment == self.fragments:
            return -(-self.every // self.fragments)
        return (fragment + 1) * self.every // self.fragments - fragment * self.every // self.fragments

    @property
    def steps_at_nodes(self) -> bool:
        """Sites exchange at every step, and the nodes do the optimizer's."""
        return self.strategy != "diloco"

    def warms_up(self, base_commit: int) -> bool:
        """Whether a sync on that commit is one of those of gradients with which a run of momenta begins."""
        return self.strategy == "momentum" and base_commit < self.warmup_commits

    @property
    def leased_steps(self) -> int:
        """Of a site, for which it leases samples at once: H, or many where it exchanges at every step."""
        return max(self.every, LEASED_STEPS) if self.steps_at_nodes else self.every

    @property
    def snapshot_every(self) -> int:
        """Commits between two snapshots of a site; 0: none are taken."""
        return max(1, self.log_commits // (self.snapshots + 1)) if self.snapshots else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that the sites of a run share."""

    run_id: str
    """Names the run; every message carries it."""
    preset: str = ""
    """Settings of `sync` and `outer` that belong together: what this file leaves out of them is that of the preset."""
    seed: int = within(0, (1 << 63) - 1, 1)
    """Of the model's first values and of the order of samples."""
    data: str = "stdlib"
    """Name of the data set. All sites must have the same files, unless it is "local"; "stdlib" is the source of
    Python's own standard library."""
    steps: int = within(0, 1 << 40, 300)
    """Length of the run in inner steps of each site; 0 if `tokens` says it."""
    tokens: int = within(0, 1 << 60, 0)
    """Length of the run in tokens of all sites; 0 if `steps` says it."""
    min_sites: int = within(1, MAX_MEMBERS, 1)
    """Training starts when so many sites hold the starting state."""
    quorum: int = within(1, MAX_MEMBERS, 1)
    """A sync commits with at least so many contributors."""
    max_sites: int = within(1, MAX_MEMBERS, 1024)
    """At most so many sites are in the run at once; who comes then is refused."""
    time_limits: str = "lan"
    """local, lan or wan: how patient the run is."""
    save_every: int = within(0, 1 << 32, 0)
    """Sites save the model every so many commits, and always at the end; 0 is only at the end."""
    checkpoint_every: int = within(0, 1 << 32, 100)
    """Workers write the state of their inner optimizer to the site's disk every so many of their steps, and go on from
    it after a crash; 0: never, and the optimizer starts fresh."""
    max_busy_s: int = within(1, 1 << 32, 14_400)
    """Seconds that a site may announce for one thing without progress (an evaluation, a compilation) before it is
    evicted all the same."""
    overrun_steps: int = within(0, 1 << 32, 0)
    """With the coordinator away, sites train at most so many steps beyond a boundary; 0 is as many as a window
    has, `sync.every` / `sync.fragments`, or `sync.overlap_steps` if that is more. Not less than that."""
    model: ModelSettings = field(default_factory=ModelSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)

    @property
    def most_overrun_steps(self) -> int:
        """Beyond a boundary, with the coordinator away. A gradient is of the step after the last commit: none."""
        if self.sync.steps_at_nodes:
            return 0
        return self.overrun_steps or max(self.sync.window_steps(self.sync.all_fragments), self.sync.overlap_steps)


MAX_SETTINGS_CHARACTERS = 1 << 16
RUN_ID = SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def validate(settings: RunSettings) -> None:
    """Raises ConfigError, naming the key and what to choose, if a value is out of range or two contradict."""
    check_bounds("run", settings)
    if not RUN_ID.fullmatch(settings.run_id):
        raise ConfigError(
            f'run.run_id = "{settings.run_id}": 1 to 64 letters, digits, ".", "_" or "-", the first a letter or digit'
        )
    if not settings.data or len(settings.data) > 256:
        raise ConfigError('run.data must name the data set, in at most 256 characters ("stdlib", "local" or your own)')
    time_limits(settings.time_limits)
    if (settings.steps > 0) == (settings.tokens > 0):
        raise ConfigError(
            f"run.steps = {settings.steps} and run.tokens = {settings.tokens}: "
            "set one of them to the length of the run and the other to 0"
        )
    if settings.min_sites > settings.max_sites:
        raise ConfigError(
            f"run.min_sites = {settings.min_sites} is more than run.max_sites = {settings.max_sites}: "
            "the run could never start; raise max_sites"
        )
    if settings.quorum > settings.min_sites:
        raise ConfigError(
            f"run.quorum = {settings.quorum} is more than run.min_sites = {settings.min_sites}: "
            "the run could start and never sync; lower quorum or raise min_sites"
        )
    if 0 < settings.overrun_steps < settings.sync.overlap_steps:
        raise ConfigError(
            f"run.overrun_steps = {settings.overrun_steps} is less than sync.overlap_steps = "
            f"{settings.sync.overlap_steps}: sites train so far beyond a boundary in any case; choose 0 or at least "
            f"{settings.sync.overlap_steps}"
        )
    most = min(MAX_TRIMMED_SITES, MAX_TRIMMED_ELEMENTS // settings.sync.chunk_elements)
    if settings.sync.robust == "trim" and settings.max_sites > most:
        raise ConfigError(
            f'run.max_sites = {settings.max_sites} with sync.robust = "trim" and chunks of '
            f'{settings.sync.chunk_elements} elements: choose at most {most}, or "clip"'
        )
    check_outer(settings.outer, settings.sync.strategy)
    check_model(settings.model, settings.trainer)
    _check_sync(settings.sync)


def _check_gradient(sync: SyncSettings) -> None:
    """What exchanges at every step has no steps between."""
    wanted = {"every": 1, "fragments": 1, "overlap_steps": 0}
    for key, value in wanted.items():
        if (found := getattr(sync, key)) != value:
            raise ConfigError(
                f'sync.{key} = {found} with sync.strategy = "{sync.strategy}", which exchanges at every step: '
                f"choose {value}"
            )
    if sync.merge != "keep":
        raise ConfigError(f'sync.merge = "{sync.merge}" with sync.strategy = "{sync.strategy}": choose "keep"')
    if sync.strategy == "momentum" and not sync.warmup_commits:
        raise ConfigError(
            'sync.warmup_commits = 0 with sync.strategy = "momentum": the variance would stay 0; choose a sixth of the '
            "run's steps"
        )
    if sync.strategy == "momentum" and sync.codec_up in SPARSE:
        raise ConfigError(
            f'sync.strategy = "momentum" with codec {sync.codec_up}: what is not sent would be a momentum of 0; choose '
            '"gradient", or another codec'
        )


def _check_sync(sync: SyncSettings) -> None:
    if sync.strategy != "momentum" and sync.warmup_commits:
        raise ConfigError(
            f'sync.warmup_commits = {sync.warmup_commits} with sync.strategy = "{sync.strategy}", without warm-up: '
            'choose 0, or "momentum"'
        )
    if sync.steps_at_nodes:
        _check_gradient(sync)
    if sync.overlap_steps > sync.every:
        raise ConfigError(
            f"sync.overlap_steps = {sync.overlap_steps} is more than sync.every = {sync.every}: the next sync of the "
            f"same parameters begins so many steps after this one; choose at most {sync.every}"
        )
    if sync.fragments > sync.every:
        raise ConfigError(
            f"sync.fragments = {sync.fragments} is more than sync.every = {sync.every}: each fragment has a sync of "
            f"its own every {sync.every} steps, with a step or more between two; choose at most {sync.every} fragments"
        )
    if sync.codec_up in SPARSE and sync.down:
        raise ConfigError(
            f'sync.down = "{sync.down}" with codec {sync.codec_up}, whose pseudo-gradients go to all sites themselves: '
            "choose no sync.down"
        )
    if sync.codec_down in SPARSE:
        raise ConfigError(
            f'sync.codec = "{sync.codec}" with sync.up = "{sync.up}": averages of {sync.up} cannot travel as '
            f"{sync.codec}; choose another sync.codec, or a sync.down"
        )
    if sync.mean_over != "senders" and sync.codec_up not in SPARSE:
        raise ConfigError(
            f'sync.mean_over = "{sync.mean_over}" with codec {sync.codec_up}, which sends every element: choose '
            f'"senders", or codec {SPARSE[0]}'
        )
    if sync.robust == "trim" and sync.codec_up in SPARSE:
        raise ConfigError(
            f'sync.robust = "trim" with codec {sync.codec_up}, which sends few elements: choose "clip", or another '
            "codec"
        )
    if sync.robust != "trim" and sync.trim != 1:
        raise ConfigError(
            f'sync.trim = {sync.trim} with sync.robust = "{sync.robust}", which cuts nothing: choose "trim"'
        )
    if sync.error_feedback and sync.codec_up == "fp32":
        raise ConfigError(
            f"sync.error_feedback = {sync.error_feedback} with codec fp32, which loses nothing: choose 0, or another "
            "sync.codec or sync.up"
        )
    if sync.error_feedback_down and sync.codec_down in ("fp32", BUNDLE):
        what = "with averages in fp32, which loses nothing: choose 0, or another sync.down"
        if sync.codec_down == BUNDLE:
            what = (
                f"with {sync.codec_up}, where each site averages by itself: choose 0, or another sync.codec or sync.up"
            )
        raise ConfigError(f"sync.error_feedback_down = {sync.error_feedback_down} {what}")
    if sync.error_feedback_down and sync.log_commits <= sync.fragments:
        raise ConfigError(
            f"sync.error_feedback_down = {sync.error_feedback_down} with sync.log_commits = {sync.log_commits}: the "
            "last commit of a fragment has to be in the log, by which a site knows that it made that average; choose "
            f"more than sync.fragments ({sync.fragments})"
        )
    if sync.merge == "mix" and not sync.alpha:
        raise ConfigError(
            'sync.merge = "mix" and sync.alpha = 0: the local copy would have no weight, and what it was trained '
            'meanwhile be lost; choose an alpha between 0 and 1, for example 0.5, or merge "keep"'
        )
    if sync.merge == "keep" and sync.alpha:
        raise ConfigError(f'sync.alpha = {sync.alpha}: sync.merge = "keep" has no weights; choose "mix" or alpha 0')


# --- as text: in the store, in Welcome, and to the workers

WITHDRAWN = {"sync.zstd_level": "zstd is a property of the codec"}
"""Settings that older versions had, and why they have no effect any more."""
CAPABILITIES = frozenset([
    *(f"codec {name}" for name in CODECS), *(f"outer optimizer {name}" for name in OUTER_OPTIMIZERS), "zstd",
    "a codec for each direction", "mean over all", "error feedback", "error feedback of averages", "overlap",
    "merge mix", "fragments", "syncs in flight", "outer schedules", "clipped averages", "trimmed averages",
    "gradient exchange", "momentum exchange",
])  # fmt: skip
"""What a run may need of whoever takes part, by name, and this version can do."""
MAX_NEEDS = 256


def needs_of(settings: RunSettings) -> list[str]:
    """What a node or coordinator must be able to do for this run. A setting that changes what they compute, and that
    an older version would pass over, adds a name here when it has another value than its default."""
    sync, outer = settings.sync, settings.outer
    is_sparse = sync.codec_up in SPARSE
    extra = {
        "a codec for each direction": not is_sparse and len({sync.codec, sync.codec_up, sync.codec_down}) > 1,
        "mean over all": sync.mean_over == "all",
        "error feedback": sync.error_feedback > 0,
        "error feedback of averages": sync.error_feedback_down > 0,
        "overlap": sync.overlap_steps > 0,
        "merge mix": sync.merge == "mix",
        "fragments": sync.fragments > 1,
        "syncs in flight": sync.most_in_flight > 1,
        "clipped averages": sync.robust == "clip",
        "trimmed averages": sync.robust == "trim",
        "gradient exchange": sync.steps_at_nodes,
        "momentum exchange": sync.strategy == "momentum",
        "outer schedules": any((outer.warmup, outer.decay, outer.momentum_warmup, outer.momentum_decay)),
    }
    warmup = [sync.warmup_codec] if sync.warmup_commits else []
    codecs = [sync.codec_up] if is_sparse else dict.fromkeys((sync.codec_up, sync.codec_down, *warmup))
    needs = [*(f"codec {name}" for name in codecs), f"outer optimizer {outer.optimizer}"]
    return needs + [name for name, is_needed in extra.items() if is_needed]


def settings_to_json(settings: RunSettings) -> str:
    """The text that Welcome and the store carry; `settings_from_json` reads it back to an equal value."""
    return json.dumps({**asdict(settings), "needs": needs_of(settings)}, sort_keys=True)


def settings_from_json(text: str) -> RunSettings:
    return read_settings(text)[0]


def read_settings(text: str) -> tuple[RunSettings, tuple[str, ...]]:
    """Settings as this version, an older or a newer one wrote them, and the keys that are not known here.

    What an older version left out has its default; what a newer one added is passed over, for whatever must not be is
    in `needs`. Raises UnsupportedError if the run needs what this version cannot do, InvalidMessage for other text.
    """
    if len(text) > MAX_SETTINGS_CHARACTERS:
        raise InvalidMessage(f"settings: {len(text)} characters, at most {MAX_SETTINGS_CHARACTERS} are allowed")
    unknown: list[str] = []
    try:
        table = json.loads(text, object_pairs_hook=_distinct, parse_constant=_not_finite)
        if not isinstance(table, dict):
            raise InvalidMessage("settings: not a JSON object")
        _check_needs(table.pop("needs", []))
        settings = build(RunSettings, table, "settings", unknown=unknown)
        validate(settings)
    except (ConfigError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"the run's settings are not ones this version understands ({error}); install the coordinator's version"
        ) from error
    keys = (key.removeprefix("settings.") for key in unknown)
    return settings, tuple(key for key in keys if key not in WITHDRAWN)


def _check_needs(needs: object) -> None:
    names = check(tuple[str, ...], needs, "settings: needs")
    if len(names) > MAX_NEEDS:
        raise ConfigError(f"settings: needs has {len(names)} names, at most {MAX_NEEDS} are allowed")
    lacking = [name for name in names if name not in CAPABILITIES]
    if lacking:
        raise UnsupportedError(
            f"the run needs what this version cannot do: {', '.join(lacking)}; install the coordinator's version"
        )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ConfigError("a key is given twice")
    return table


def _not_finite(text: str) -> float:
    raise ConfigError(f"{text} is not a finite number")
