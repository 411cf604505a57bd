"""The settings of a run. They live at the coordinator and reach the nodes in Welcome. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.protocol.bounds import check_bounds, within
from atoll.protocol.codecs.table import CODECS, SPARSE
from atoll.protocol.errors import ConfigError, InvalidMessage, UnsupportedError
from atoll.protocol.logged import LoggedValue
from atoll.protocol.messages import MAX_MEMBERS
from atoll.protocol.model_settings import ModelSettings, TrainerSettings, check_model
from atoll.protocol.outer_settings import OUTER_OPTIMIZERS, OuterSettings, check_outer
from atoll.protocol.strict import build, check
from atoll.protocol.sync_settings import MAX_COMPARED_ELEMENTS, MAX_COMPARED_SITES, SyncSettings, check_sync
from atoll.protocol.time_limits import time_limits


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
    keep_models: int = within(1, 1024, 1)
    """With `save_every`: the newest so many saved models stay on a site's disk, the earlier ones beside the newest, by
    the number of their commit (model.commit-40)."""
    best_by: str = ""
    """With `save_every`: the saved model that is best by this value, which scripts log of the outer parameters, stays
    on the sites' disks beside the others (model.best). The first site that logs it is the judge, and another one when
    that has left. Empty: none."""
    best_is: str = "lowest"
    """lowest or highest: which value of `best_by` is the best."""
    checkpoint_every: int = within(0, 1 << 32, 100)
    """Workers write the state of their inner optimizer to the site's disk every so many of their steps, and go on from
    it after a crash; 0: never, and the optimizer starts fresh."""
    max_busy_s: int = within(1, 1 << 32, 14_400)
    """Seconds that a site may announce for one thing without progress (an evaluation, a compilation) before it is
    evicted all the same."""
    overrun_steps: int = within(0, 1 << 32, 0)
    """With the coordinator away, sites train at most so many steps beyond a boundary; 0 is as many as a window
    has, `sync.every` / `sync.fragments`, or `sync.overlap_steps` if that is more. Not less than
    `sync.overlap_steps`."""
    model: ModelSettings = field(default_factory=ModelSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)

    @property
    def most_overrun_steps(self) -> int:
        """Beyond a boundary, with the coordinator away. A gradient is of the step after the last commit: none."""
        if self.sync.steps_at_nodes:
            return 0
        return self.overrun_steps or max(self.sync.window_steps(self.sync.all_fragments, 0), self.sync.overlap_steps)


MAX_SETTINGS_CHARACTERS = 1 << 16
BEST_IS = ("lowest", "highest")
LEAST_MEDIAN_SITES = 3
"""Contributors of a commit whose average is a geometric median: that of two is anywhere between them."""
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
    if settings.keep_models > 1 and not settings.save_every:
        raise ConfigError(
            f"run.keep_models = {settings.keep_models} without run.save_every: there is one model, that of the end; "
            "say with save_every how often sites save it"
        )
    if settings.best_by and not settings.save_every:
        raise ConfigError(
            f'run.best_by = "{settings.best_by}" without run.save_every: it is one of the models that sites save; say '
            "how often they save one"
        )
    if settings.best_by and (problem := LoggedValue(name=settings.best_by, step=0, value=0.0).problem):
        raise ConfigError(f"run.best_by: {problem}")
    if settings.best_is not in BEST_IS:
        raise ConfigError(f'run.best_is = "{settings.best_is}": write {" or ".join(BEST_IS)}')
    if 0 < settings.overrun_steps < settings.sync.overlap_steps:
        raise ConfigError(
            f"run.overrun_steps = {settings.overrun_steps} is less than sync.overlap_steps = "
            f"{settings.sync.overlap_steps}: sites train so far beyond a boundary in any case; choose 0 or at least "
            f"{settings.sync.overlap_steps}"
        )
    robust, most = settings.sync.robust, min(MAX_COMPARED_SITES, MAX_COMPARED_ELEMENTS // settings.sync.chunk_elements)
    if robust in ("trim", "gram") and settings.max_sites > most:
        raise ConfigError(
            f'run.max_sites = {settings.max_sites} with sync.robust = "{robust}" and chunks of '
            f'{settings.sync.chunk_elements} elements: choose at most {most}, or "clip"'
        )
    if robust == "gram" and settings.quorum < LEAST_MEDIAN_SITES:
        raise ConfigError(
            f'run.quorum = {settings.quorum} with sync.robust = "gram": of fewer than {LEAST_MEDIAN_SITES} '
            f"contributions nobody can say which one is wrong; choose {LEAST_MEDIAN_SITES} or more, or sync.robust = "
            '"clip"'
        )
    check_outer(settings.outer, settings.sync.strategy)
    check_model(settings.model, settings.trainer)
    check_sync(settings.sync)


# --- as text: in the store, in Welcome, and to the workers

WITHDRAWN = {"sync.zstd_level": "zstd is a property of the codec"}
"""Settings that older versions had, and why they have no effect any more."""
CHANGES = "settings that change"
CAPABILITIES = frozenset([
    *(f"codec {name}" for name in CODECS), *(f"outer optimizer {name}" for name in OUTER_OPTIMIZERS), "zstd",
    "a codec for each direction", "mean over all", "error feedback", "error feedback of averages", "overlap",
    "merge mix", "fragments", "syncs in flight", "outer schedules", "clipped averages",
    "trimmed averages without the highest norms", "gradient exchange", "momentum exchange", "phases of momenta",
    "rotary base", "norm epsilon", "experts", CHANGES, "audited reducers", "averages by influence", "the best model",
])  # fmt: skip
"""What a run may need of whoever takes part, by name, and this version can do."""
MAX_NEEDS = 256


def needs_of(settings: RunSettings) -> list[str]:
    """What a node or coordinator must be able to do for this run. A setting that changes what they compute, and that
    an older version would pass over, adds a name here when it has another value than its default."""
    sync, outer, model, usual = settings.sync, settings.outer, settings.model, ModelSettings()
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
        "trimmed averages without the highest norms": sync.robust == "trim",
        "averages by influence": sync.robust == "gram",
        "audited reducers": sync.audits > 0,
        "gradient exchange": sync.steps_at_nodes,
        "momentum exchange": sync.strategy == "momentum",
        "phases of momenta": sync.has_phases,
        "outer schedules": any((outer.warmup, outer.decay, outer.momentum_warmup, outer.momentum_decay)),
        "rotary base": model.rope_base != usual.rope_base,
        "norm epsilon": model.norm_eps != usual.norm_eps,
        "experts": model.num_experts > 0,
        "the best model": settings.best_by != "",
    }
    warmup = [sync.warmup_codec] if sync.warmup_commits else []
    codecs = [sync.codec_up] if is_sparse else dict.fromkeys((sync.codec_up, sync.codec_down, *warmup))
    needs = [*(f"codec {name}" for name in codecs), f"outer optimizer {outer.optimizer}"]
    return needs + [name for name, is_needed in extra.items() if is_needed]


def settings_to_json(settings: RunSettings) -> str:
    """The text that Welcome and the store carry; `settings_from_json` reads it back to an equal value."""
    return json.dumps({**asdict(settings), "needs": needs_of(settings)}, sort_keys=True)


def needing_changes(settings_json: str) -> str:
    """The same for whoever comes while settings are not as the run began."""
    table = json.loads(settings_json)
    return json.dumps({**table, "needs": [*table["needs"], CHANGES]}, sort_keys=True)


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
