"""The settings of syncs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.bounds import one_of, within
from atoll.protocol.codecs.table import BUNDLE, CODECS, DENSE, SPARSE
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import MAX_CHUNKS, MAX_FRAGMENTS
from atoll.protocol.phases import Phases

LEASED_STEPS = 64
STRATEGIES = ("diloco", "gradient", "momentum")
MERGES = ("keep", "mix")
MEANS = ("senders", "all")
ROBUST = ("off", "warn", "clip", "trim", "gram")
MAX_LOG_COMMITS = 4096
USUAL_LOG_COMMITS = 32
"""Where sites train by themselves between syncs, which takes longer than to fetch a state."""
MAX_COMPARED_SITES = 64
MAX_AUDITS = 64
MAX_CHUNK_ELEMENTS = 1 << 24
KEPT_SYNCS, KEPT_STEPS = 8, 32
"""That are over: what an audit and those that settle it ask for is kept by sites so long. The second where they
exchange at every step: a sync takes some round trips there, and an audit some more."""
AUDITED_STEPS = 16
"""Of so many commits there one is audited, on average, so that audits do not fall behind."""
MAX_COMPARED_ELEMENTS = 1 << 26
"""To cut the highest and the lowest of each element, or to multiply contributions with each other, a thread of a
reducer holds a chunk of every site in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    strategy: str = one_of(STRATEGIES, "diloco")
    """diloco, gradient or momentum. diloco: sites train `every` steps by themselves, then average what these changed.
    gradient: they average the gradient of each step, and the nodes do the optimizer's step; `every` is 1. momentum: so
    they begin, and after `warmup_commits` they average their momenta instead, and Adam's variance stays as it is
    (1-bit Adam, arXiv 2102.02888); with `local_doubling` those of ever more steps (0/1 Adam, arXiv 2202.06009)."""
    warmup_commits: int = within(0, 1 << 40, 0)
    """With strategy momentum: so many commits of gradients at first, in `warmup_codec`. The paper takes a sixth of a
    run."""
    warmup_codec: str = one_of(DENSE, "bf16")
    """How gradients and their averages travel in these commits."""
    gradient_doubling: int = within(0, 1 << 40, 0)
    """With strategy momentum: in the warm-up commits of gradients thin out. All of the first so many commits are of
    gradients, every second one of twice as many that follow, every fourth one of four times as many, and so on; those
    between are of momenta (0/1 Adam, arXiv 2202.06009, which takes 16). 0: all commits of the warm-up are."""
    local_doubling: int = within(0, 1 << 40, 0)
    """With strategy momentum: after the warm-up sites do steps by themselves. Each of the first so many commits has one
    step, each of as many that follow two, then four, and so on (0/1 Adam). 0: each commit has one."""
    most_local_steps: int = within(2, LEASED_STEPS // 2, 16)
    """That a site does by itself between two commits."""
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
    """fp32, bf16, fp16, int8, int4, e3m0, int2, sign1, topk2, dct1 or dct1k4: how pseudo-gradients and their averages
    travel; docs/codecs.md says what each costs."""
    up: str = one_of(("", *CODECS), "")
    """The codec of pseudo-gradients alone, where it is another one; empty: `codec`."""
    down: str = one_of(("", *DENSE), "")
    """The codec of their averages alone, where it is another one; empty: `codec`. topk2, dct1 and dct1k4 have none: the
    pseudo-gradients themselves go to all sites."""
    mean_over: str = one_of(MEANS, "senders")
    """senders or all: with topk2, dct1 and dct1k4 each value is averaged over the sites that sent it (arXiv
    2508.15706), or over all, as if the others had sent 0."""
    error_feedback: float = within(0, 1, 0.0)
    """beta: what the codec lost of a site's contribution, times beta, is added to its next one (arXiv 1901.09847); 0:
    it is lost. A site keeps 4 bytes a parameter for it."""
    error_feedback_down: float = within(0, 1, 0.0)
    """The same of the averages: what the codec lost of one, times beta, is added to the next one by the site that
    averages it, as long as that is the same site (two-sided error feedback, arXiv 2102.02888)."""
    robust: str = one_of(ROBUST, "warn")
    """off, warn, clip, trim or gram: what becomes of contributions with high norms, above `clip` times the median of
    all sites'. warn: a site that has them again and again is named. clip: they are made as small as that. trim: the
    `trim` highest of them are left out, where enough others are there, and of each element the `trim` highest and
    lowest values of all others (arXiv 1803.01498). gram: the average of a sync is the geometric median of what its
    sites contribute (arXiv 1912.13445), which the coordinator finds by inner products; it needs `run.quorum` = 3 or
    more, and each commit takes one more way to the coordinator and back."""
    clip: float = within(1, 1 << 20, 3.0)
    """Times the median norm of a chunk's contributions."""
    trim: int = within(1, MAX_COMPARED_SITES // 2, 1)
    """Contributions on each side; fewer where that would leave none."""
    audits: int = within(0, MAX_AUDITS, 0)
    """Chunks of each commit that are averaged once more by a site that did not reduce them, drawn by the coordinator: a
    reducer that lies is found. Each costs what every contributor sent of one chunk, and every site keeps what it
    contributed to its last syncs; 0: none. Buffers (statistics of BatchNorm and the like) are drawn too; no
    file is kept that shows a false one to others. A run that exchanges gradients or momenta audits one commit of 16,
    also by draw, keeps contributions to 32 syncs in place of 8, and has no error_feedback_down then."""
    chunk_elements: int = within(1, MAX_CHUNK_ELEMENTS, 1 << 20)
    """The most elements of a chunk, the unit that is sent, reduced, hashed and repaired: docs/protocol.md, "Chunks"."""
    max_chunks: int = within(1, MAX_CHUNKS, 1 << 18)
    """A model of more chunks is refused: up to 2.7e11 elements at the usual size of a chunk."""
    max_weight_ratio: int = within(2, 1 << 20, 16)
    """A site's tokens count up to so many times the pace of the median contributor; what is beyond has no weight."""
    max_tokens_per_sample: int = within(1, 1 << 40, 1 << 20)
    """Most tokens of one sample, but not of a shard of a stream. A site that says more of the samples that it leases is
    refused."""
    log_commits: int = within(0, MAX_LOG_COMMITS, 0)
    """Payloads of this many commits stay on each site's disk; 0: of 32, or where sites exchange at every step of as
    many as have 48 bytes a parameter, and of 1,024 of a small model (docs/memory.md)."""
    snapshots: int = within(0, 64, 2)
    """Snapshots of the outer state that stay on each site's disk. They are taken every so many commits as the log has,
    over snapshots + 1, so that the newest one and the log give the state back after a power cut; 0: none."""
    fsync: bool = False
    """Payloads are on the disk for good before Done, and the record of a commit before it is applied. Without it a
    process crash loses nothing; a power cut may take a site back by some commits, to its last snapshot at worst. A new
    run.toml has it on; where sites exchange at every step its cost is a larger part of a sync."""

    @property
    def codec_up(self) -> str:
        return self.up or self.codec

    @property
    def codec_down(self) -> str:
        """Or that they are bundled."""
        return BUNDLE if self.codec_up in SPARSE else self.down or self.codec

    @property
    def most_log_commits(self) -> int:
        """That a payload log has, whatever the model."""
        return self.log_commits or (MAX_LOG_COMMITS if self.steps_at_nodes else USUAL_LOG_COMMITS)

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

    def window_steps(self, fragment: int, base_commit: int) -> int:
        """Inner steps from the boundary before to that of a sync of the fragment on that commit: H in one cycle of all
        fragments. A sync of all at once has the steps of the longest window."""
        if self.steps_at_nodes:
            return self.phases.steps(base_commit + 1)
        if fragment == self.fragments:
            return -(-self.every // self.fragments)
        return (fragment + 1) * self.every // self.fragments - fragment * self.every // self.fragments

    @property
    def num_kept_syncs(self) -> int:
        """With audits: of how many a site keeps what it contributes, those under way among them."""
        return (KEPT_STEPS if self.steps_at_nodes else KEPT_SYNCS) + self.most_in_flight

    @property
    def averages_by_influence(self) -> bool:
        """What a contribution counts is found by inner products of all, in each sync."""
        return self.robust == "gram"

    @property
    def steps_at_nodes(self) -> bool:
        """The nodes do the optimizer's steps; sites exchange at each, or do some by themselves."""
        return self.strategy != "diloco"

    @property
    def has_phases(self) -> bool:
        """Whether a run of momenta is one of 0/1 Adam."""
        return self.gradient_doubling > 0 or self.local_doubling > 0

    @property
    def may_read_in_place(self) -> bool:
        """Whether ranks without a GPU, on one host, take outer values from the outer file, so that PUBLISH holds no
        copy: they wait for each sync, which is of the whole model."""
        return self.fragments == 1 and not self.overlap_steps and not self.steps_at_nodes

    @property
    def num_shared_moments(self) -> int:
        """Of adamw: how many a node shares with its ranks, which do steps by themselves with them."""
        return 2 if self.local_doubling else 0

    def moments_at(self, base_commit: int) -> int:
        """How many of them it shares with that commit: all before steps that ranks do by themselves."""
        return self.num_shared_moments if self.phases.is_local(base_commit + 1) else 0

    @property
    def phases(self) -> Phases:
        return Phases(
            warmup_commits=self.warmup_commits,
            gradient_doubling=self.gradient_doubling,
            local_doubling=self.local_doubling,
            most_local_steps=self.most_local_steps,
        )

    def moves_variance(self, base_commit: int) -> bool:
        """Whether a sync on that commit is one of gradients in a run of momenta."""
        return self.strategy == "momentum" and self.phases.is_of_gradients(base_commit + 1)

    @property
    def leased_steps(self) -> int:
        """Of a site, for which it leases samples at once: H, or many where it exchanges at every step."""
        return max(self.every, LEASED_STEPS) if self.steps_at_nodes else self.every


def check_sync(sync: SyncSettings) -> None:
    """Raises ConfigError, naming the key and what to choose, where two settings contradict."""
    if sync.strategy != "momentum" and sync.warmup_commits:
        raise ConfigError(
            f'sync.warmup_commits = {sync.warmup_commits} with sync.strategy = "{sync.strategy}", without warm-up: '
            'choose 0, or "momentum"'
        )
    for key in ("gradient_doubling", "local_doubling"):
        if sync.strategy != "momentum" and (found := getattr(sync, key)):
            raise ConfigError(
                f'sync.{key} = {found} with sync.strategy = "{sync.strategy}", which has no such phases: choose 0, or '
                '"momentum"'
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
    if sync.robust in ("trim", "gram") and sync.codec_up in SPARSE:
        what = "which sends few elements" if sync.robust == "trim" else "where each site averages by itself"
        raise ConfigError(
            f'sync.robust = "{sync.robust}" with codec {sync.codec_up}, {what}: choose "clip", or another codec'
        )
    if sync.robust != "trim" and sync.trim != 1:
        raise ConfigError(
            f'sync.trim = {sync.trim} with sync.robust = "{sync.robust}", which cuts nothing: choose "trim"'
        )
    if sync.audits:
        _check_audits(sync)
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
    if sync.error_feedback_down and (log_commits := sync.log_commits or USUAL_LOG_COMMITS) <= sync.fragments:
        raise ConfigError(
            f"sync.error_feedback_down = {sync.error_feedback_down} with sync.log_commits = {log_commits}: the "
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


def _check_audits(sync: SyncSettings) -> None:
    """What is averaged once more has to have the same bits at every site, and be of what sites can show."""
    problem = ""
    if sync.steps_at_nodes and sync.error_feedback_down:
        problem = (
            f'sync.error_feedback_down = {sync.error_feedback_down} and sync.strategy = "{sync.strategy}", in which '
            "commits are made faster than it is known whether a reducer keeps silent"
        )
    elif sync.steps_at_nodes and 0 < sync.log_commits < AUDITED_STEPS:
        problem = (
            f'sync.log_commits = {sync.log_commits} and sync.strategy = "{sync.strategy}": what settles an audit '
            f"computes from payloads of {AUDITED_STEPS} commits"
        )
    elif sync.error_feedback_down and (sync.log_commits or USUAL_LOG_COMMITS) < KEPT_SYNCS + sync.fragments:
        problem = (
            f"sync.error_feedback_down = {sync.error_feedback_down} and sync.log_commits = {sync.log_commits}: what "
            f"settles whether a reducer keeps silent needs payloads of {KEPT_SYNCS + sync.fragments} commits"
        )
    elif sync.robust in ("clip", "trim") and sync.codec_down != BUNDLE:
        which = f'sync.robust = "{sync.robust}" with codec {sync.codec_up}'
        problem = f"{which}, whose norms may differ in their last bits by machine"
    if problem:
        raise ConfigError(
            f"sync.audits = {sync.audits} with {problem}: choose sync.audits = 0, or another setting there"
        )


def _check_gradient(sync: SyncSettings) -> None:
    """What exchanges at every step has no steps between."""
    wanted = {"every": 1, "fragments": 1, "overlap_steps": 0}
    for key, value in wanted.items():
        if (found := getattr(sync, key)) != value:
            raise ConfigError(
                f'sync.{key} = {found} with sync.strategy = "{sync.strategy}", in which the nodes do the steps: '
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
