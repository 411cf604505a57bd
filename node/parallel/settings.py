"""How the ranks of a site share one model, as a line of text says it: `dp_shard=2,tp=2`. Pure.

It belongs to a site and not to the run: sites of different layouts train one model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from atoll.node.parallel.positions import Cut
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.strict import nearest

THE_REST = -1
MAX_RANKS = 1 << 20
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost to the innermost: neighbouring ranks, which have the fastest links, share a tensor."""
SIZES = (*DIMENSIONS, "ep")
"""One of them may be `THE_REST`."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of torch.distributed.pipelining."""
V_SCHEDULES = ("zbv", "dualpipev")
"""Whose second stage of a rank lies as far from the end as its first one from the start."""
DIVIDING_SCHEDULES = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""That divide a backward pass into two. Where parameters are gathered for each use, torch 2.13 gives them wrong
gradients: tests/process/test_layouts.py has zero=2 with each."""
ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
OTHER_WORDS = {"fsdp": "dp_shard", "ddp": "dp_replicate", "dp": "dp_replicate"}
"""Of the field; `atoll demo --layouts` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """Of one site. Its batch, and so its weight, do not depend on them.

    One of dp_replicate, dp_shard, cp, tp and pp may be -1: as many as there are ranks left. So may ep: all ranks of
    dp_shard and cp.
    """

    dp_replicate: int = 1
    """Replicas of the model, each on its share of the batch."""
    dp_shard: int = 1
    """Ranks that share one replica's parameters, gradients and optimizer (FSDP2), each on its share of the batch; with
    dp_replicate, HSDP."""
    cp: int = 1
    """Ranks that share each sequence (context parallelism), and with dp_shard the parameters."""
    cp_ulysses: int = 0
    """Of cp, how many exchange heads for positions (Ulysses); such groups form rings; 0: as many as can without sending
    a key/value head to several ranks."""
    tp: int = 1
    """Ranks that share each matrix (tensor parallelism), on the same batch."""
    ep: int = 1
    """Of the ranks of dp_shard and cp, how many share the experts of a model that has some (expert parallelism)."""
    sequence_parallel: int = 0
    """With tp: 1 divides by positions what is between the matrices, norms and the residual stream."""
    pp: int = 1
    """Stages of a pipeline, on the same batch."""
    zero: int = 3
    """With dp_shard: 3 gathers the parameters of a block for each use, 2 once a step. With dp_replicate alone: 1 shares
    the optimizer's state, 0 nothing (DDP), as where nothing is said."""
    pp_schedule: str = "1f1b"
    """Of the pipeline: gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv or dualpipev."""
    microbatches: int = 0
    """A step's batch goes through the pipeline in so many parts; 0: twice as many as there are stages."""
    accumulation: int = 1
    """A step's batch goes through the model in so many parts, one after the other; their gradients are summed."""
    checkpointing: str = "none"
    """What is computed again in the backward pass, to save memory: none, selective (all but matrix products and
    attention) or full (each block)."""
    precision: str = "fp32"
    """Of computing: fp32, or bf16 with parameters and sums of gradients in fp32."""
    compile: int = 0
    """1 has each block compiled (`torch.compile`), at its first use."""
    offload: int = 0
    """With dp_shard, or dp_replicate and tp or pp: 1 keeps parameters, gradients and the optimizer's state in the
    host's memory, where the optimizer does its steps."""

    def __str__(self) -> str:
        """What was said, in one line: `parse` gives the same settings back."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{name}={value}" for name, value in said.items())

    @property
    def num_stages_of_rank(self) -> int:
        return 1 if self.pp_schedule in ONE_STAGE_SCHEDULES else 2

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.pp * self.num_stages_of_rank

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or 2 * self.num_stages

    @property
    def num_data_ranks(self) -> int:
        """Shares of the batch, once no size is `THE_REST`."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_sharded(self) -> bool:
        """Ranks share parameters; true also where dp_shard or cp is `THE_REST`."""
        return self.dp_shard != 1 or self.cp != 1

    @property
    def has_fsdp(self) -> bool:
        """FSDP2 has the parameters, once no size is `THE_REST`: shards, or replicas of what is shared otherwise."""
        return self.is_sharded or (self.dp_replicate > 1 and not self.is_replicated_alone)

    @property
    def is_replicated_alone(self) -> bool:
        """Each rank has the whole model, and DDP averages their gradients."""
        return self.dp_shard == self.cp == self.tp == self.pp == 1

    @property
    def takes_the_rest(self) -> bool:
        """Whether the number of ranks has to be said, as a dimension is what is left of them."""
        return any(getattr(self, name) == THE_REST for name in DIMENSIONS)

    def num_ranks(self, given: int) -> int:
        """That a site needs which was told to have `given`, where 1 is nothing said. Raises ConfigError."""
        sizes: dict[str, int] = {name: getattr(self, name) for name in DIMENSIONS}
        product = math.prod(size for size in sizes.values() if size != THE_REST)
        if not self.takes_the_rest:
            if given not in (1, product):
                said = ",".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "dp_replicate=1"
                raise ConfigError(
                    f"--ranks {given} and --parallel {said}, which needs {product}: leave out --ranks, or let "
                    f"one of {', '.join(DIMENSIONS)} be -1, which takes what is left"
                )
            return product
        if given % product:
            raise ConfigError(
                f"--ranks {given} cannot be divided by the {product} that --parallel {self} names; choose --ranks "
                f"{math.ceil(given / product) * product}, or other sizes"
            )
        return given

    def resolved(self, num_ranks: int) -> ParallelSettings:
        """With a number for each size. Raises ConfigError."""
        total = self.num_ranks(num_ranks)
        if total != num_ranks:
            raise ConfigError(f"--parallel {self} needs {total} ranks, this site has {num_ranks}")
        named = math.prod(size for name in DIMENSIONS if (size := getattr(self, name)) != THE_REST)
        found = replace(self, **{n: num_ranks // named for n in DIMENSIONS if getattr(self, n) == THE_REST})
        if found.ep == THE_REST:
            found = replace(found, ep=found.dp_shard * found.cp)
        if found.zero == 2 and not found.is_sharded:  # one rank was left
            found = replace(found, zero=3)
        _check_sizes(found)
        if (shards := found.dp_shard * found.cp) % found.ep:
            raise ConfigError(
                f"--parallel ep={found.ep} does not divide the {shards} ranks of dp_shard={found.dp_shard} and "
                f"cp={found.cp}, of which it takes some to share experts: choose another ep, or say dp_shard={found.ep}"
            )
        if found.offload and not found.has_fsdp:
            raise ConfigError(
                "--parallel offload=1 is of parameters that FSDP2 has: say dp_shard=2 or more, or leave out offload"
            )
        return found

    def num_ulysses(self, model: ModelSettings) -> int:
        """Ranks that exchange heads; `cp` divided by it is the length of a ring."""
        return self.cp_ulysses or math.gcd(self.cp, model.num_kv_heads // self.tp)


ALONE = ParallelSettings()


def parse(text: str) -> ParallelSettings:
    """`dp_shard=2,tp=2`; where no size is said, each rank has the whole model. Raises ConfigError, naming what is wrong
    and what to choose."""
    kinds: dict[str, type] = get_type_hints(ParallelSettings)
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in kinds:
            hint = nearest(OTHER_WORDS.get(name, name), kinds)
            raise ConfigError(f'--parallel "{text}": there is no "{name}"; {hint}')
        if not equals or not value:
            raise ConfigError(f'--parallel "{text}": say "{name}=..." with a value')
        if name in values:
            raise ConfigError(f'--parallel "{text}": {name} is said twice')
        try:
            values[name] = kinds[name](value)
        except ValueError:
            commas = "; settings are divided by commas" if "=" in value else ""
            raise ConfigError(f'--parallel "{text}": {name} is a whole number, not "{value}"{commas}') from None
    if not values.keys() & set(DIMENSIONS):
        values["dp_replicate"] = THE_REST
    settings = ParallelSettings(**values)
    if (zero := values.get("zero", 0)) in (2, 3) and not settings.is_sharded:  # where nobody said 3, it is DDP
        raise ConfigError(f"--parallel zero={zero} is of shards: say dp_shard=2 or more, or cp=2 or more")
    _check(settings)
    return settings


def _check(settings: ParallelSettings) -> None:
    """What is wrong whatever size `THE_REST` is."""
    for name in SIZES:
        if (size := getattr(settings, name)) != THE_REST and not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"--parallel {name}={size}: choose 1 to {MAX_RANKS}, or -1 for the ranks that are left")
    if settings.ep == THE_REST and not settings.is_sharded:
        raise ConfigError(
            "--parallel ep=-1 takes all ranks of dp_shard and cp, and there is one: say dp_shard=2 or more, or cp=2"
        )
    if len(rest := [name for name in SIZES if getattr(settings, name) == THE_REST]) > 1:
        said = ",".join(f"{name}=-1" for name in rest)
        raise ConfigError(
            f"--parallel {said}: only one of them can take the ranks that are left; give the others a number"
        )
    for name, choices in (
        ("zero", (0, 1, 2, 3)),
        ("sequence_parallel", (0, 1)),
        ("compile", (0, 1)),
        ("offload", (0, 1)),
        ("pp_schedule", tuple(SCHEDULES)),
        ("checkpointing", ("none", "selective", "full")),
        ("precision", ("fp32", "bf16")),
    ):
        if getattr(settings, name) not in choices:
            said, known = str(getattr(settings, name)), [str(choice) for choice in choices]
            raise ConfigError(f"--parallel {name}={said}: {nearest(said, known)}")
    if settings.accumulation < 1 or settings.microbatches < 0:
        raise ConfigError("--parallel accumulation and microbatches: at least 1")
    if settings.cp_ulysses < 0:
        raise ConfigError(f"--parallel cp_ulysses={settings.cp_ulysses}: at least 1, a divisor of cp")
    if settings.pp_schedule in DIVIDING_SCHEDULES and settings.checkpointing == "selective":
        raise ConfigError(
            f"--parallel checkpointing=selective with pp_schedule={settings.pp_schedule}, which divides backward "
            "passes: what is kept would be given up after the first half; choose checkpointing=full or none"
        )
    if settings.pp_schedule in DIVIDING_SCHEDULES and settings.compile:
        raise ConfigError(
            f"--parallel compile=1 with pp_schedule={settings.pp_schedule}, which divides backward passes: that of a "
            "compiled block is one; leave out compile, or choose another pp_schedule"
        )
    if settings.pp_schedule in DIVIDING_SCHEDULES and settings.is_sharded and settings.zero != 2:
        raise ConfigError(
            f"--parallel pp_schedule={settings.pp_schedule} with dp_shard or cp needs zero=2: it divides backward "
            "passes, between which the parameters of zero=3 are given up"
        )
    if settings.zero == 0 and settings.is_sharded:
        raise ConfigError("--parallel zero=0 shares nothing: say dp_replicate in place of dp_shard, or leave out zero")
    if settings.zero == 1 and (not settings.is_replicated_alone or settings.dp_replicate == 1):
        raise ConfigError(
            "--parallel zero=1 is of ranks that each have the whole model: say dp_replicate=2 or more, or -1, and "
            "nothing else that shares it; with dp_shard, zero=2 and zero=3 share the optimizer's state too"
        )
    if THE_REST not in (settings.pp, settings.cp, settings.tp, settings.ep):
        _check_sizes(settings)


def _check_sizes(settings: ParallelSettings) -> None:
    """What is wrong with sizes of which none but dp_replicate or dp_shard may be `THE_REST`."""
    if settings.pp == 1 and (settings.microbatches or settings.pp_schedule != "1f1b"):
        raise ConfigError("--parallel microbatches and pp_schedule are of a pipeline: say pp=2 or more")
    if settings.pp > 1 and settings.accumulation > 1:
        raise ConfigError(
            f"--parallel accumulation={settings.accumulation} with pp={settings.pp}: a pipeline has microbatches, "
            f"say microbatches={settings.accumulation * settings.num_microbatches}"
        )
    if settings.sequence_parallel and settings.tp == 1:
        raise ConfigError("--parallel sequence_parallel=1 is of ranks that share matrices: say tp=2 or more")
    _check_microbatches(settings)
    if settings.ep > 1 and settings.checkpointing == "selective":
        raise ConfigError(
            f"--parallel checkpointing=selective with ep={settings.ep}: what FSDP2 does with experts inside a block is "
            "not the same when the block is computed again; choose checkpointing=full or none"
        )
    if settings.compile and settings.checkpointing == "full" and settings.tp > 1:
        raise ConfigError(
            f"--parallel compile=1 with tp={settings.tp} and checkpointing=full: torch 2.13 cannot compile that; "
            "choose checkpointing=selective, or leave out compile"
        )
    if settings.cp_ulysses and settings.cp % settings.cp_ulysses:
        raise ConfigError(
            f"--parallel cp_ulysses={settings.cp_ulysses} does not divide cp={settings.cp}; choose a divisor of it, or "
            "leave out cp_ulysses"
        )


def _check_microbatches(settings: ParallelSettings) -> None:
    """As torch's schedules ask for them."""
    number, pp, schedule = settings.num_microbatches, settings.pp, settings.pp_schedule
    least = {"1f1b": pp, "dualpipev": settings.num_stages}.get(schedule, 1)
    if pp > 1 and number < least:
        raise ConfigError(
            f"--parallel microbatches={number} with pp={pp} and pp_schedule={schedule}: at least {least}, or stages "
            "would never all be busy"
        )
    rounds = max(1, number // pp)
    if schedule.startswith("interleaved") and number % rounds:
        raise ConfigError(
            f"--parallel microbatches={number} with pp={pp} and pp_schedule={schedule}: they go in {rounds} rounds, "
            f"which do not divide them; choose microbatches={rounds * pp}"
        )


def check_model(settings: ParallelSettings, model: ModelSettings) -> None:
    """The built-in one. Raises ConfigError where it cannot be shared so."""
    for name in ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size"):
        if (size := getattr(model, name)) % settings.tp:
            raise ConfigError(f"--parallel tp={settings.tp} does not divide model.{name} = {size}; choose another tp")
    heads, ulysses = model.num_heads // settings.tp, settings.num_ulysses(model)
    if heads % ulysses:
        raise ConfigError(
            f"--parallel cp_ulysses={ulysses} does not divide the {heads} heads of a rank (model.num_heads = "
            f"{model.num_heads}, tp={settings.tp}); choose a smaller cp_ulysses, which makes longer rings"
        )
    if settings.ep > 1 and not model.num_experts:
        raise ConfigError(
            f"--parallel ep={settings.ep} with model.num_experts = 0: the model has no experts to share; leave out ep"
        )
    if model.num_experts % settings.ep:
        raise ConfigError(
            f"--parallel ep={settings.ep} does not divide model.num_experts = {model.num_experts}; choose another ep"
        )
    for name in ("sequence_parallel", "compile", "offload"):
        if model.num_experts and getattr(settings, name):
            raise ConfigError(
                f"--parallel {name}=1 with model.num_experts = {model.num_experts}: it is of dense models alone; leave "
                f"out {name}"
            )
    if settings.compile and settings.checkpointing != "none" and settings.cp > ulysses:
        raise ConfigError(
            f"--parallel compile=1 with checkpointing={settings.checkpointing} and rings of {settings.cp // ulysses} "
            "ranks: nothing would be compiled; leave out compile or checkpointing, or choose "
            f"cp_ulysses={settings.cp}, where heads can be exchanged"
        )
    if settings.num_stages > model.num_layers:
        raise ConfigError(
            f"--parallel {settings}: {settings.num_stages} stages of a pipeline, but model.num_layers = "
            f"{model.num_layers}; each stage needs a layer: choose a smaller pp"
        )
    if model.tie_embeddings and settings.pp > 1 and settings.pp_schedule in V_SCHEDULES:
        raise ConfigError(
            f"--parallel pp_schedule={settings.pp_schedule} with model.tie_embeddings: the first and the last stage "
            "are on one rank, which would have their matrix twice; choose another schedule"
        )


def check_site(text: str, num_ranks: int, settings: RunSettings) -> None:
    """Of a site that runs the built-in trainer. Raises ConfigError, before any rank is started."""
    parallel = parse(text).resolved(num_ranks)
    check_model(parallel, settings.model)
    check_batch(parallel, settings.trainer.batch_size)
    check_sequence(parallel, settings.trainer.sequence)


def check_sequence(settings: ParallelSettings, length: int) -> None:
    """Raises ConfigError unless ranks can share the positions of each equally, where they do so between matrices."""
    here = length if settings.cp == 1 else 2 * Cut(length, settings.cp).piece_size
    if settings.sequence_parallel and here % settings.tp:
        raise ConfigError(
            f"--parallel sequence_parallel=1: tp={settings.tp} does not divide the {here} positions of a rank "
            f"(trainer.sequence = {length}, cp={settings.cp}); leave out sequence_parallel, or choose another tp"
        )


def check_batch(settings: ParallelSettings, batch_size: int) -> None:
    """A site's batch, in sequences, with no size `THE_REST`. Raises ConfigError unless it can be shared equally."""
    name, parts = "accumulation", settings.accumulation
    if settings.pp > 1:
        name, parts = "microbatches", settings.num_microbatches
    needed = settings.num_data_ranks * parts
    if batch_size % needed:
        shares = [f"by {settings.num_data_ranks} data ranks"] if settings.num_data_ranks > 1 else []
        shares += [f"in {parts} parts each"] if parts > 1 else []
        other = "--ranks or --parallel" if batch_size % settings.num_data_ranks else f"--parallel {name}"
        raise ConfigError(
            f"trainer.batch_size = {batch_size} sequences cannot be shared equally {', '.join(shares)}; choose another "
            f"{other}"
        )
