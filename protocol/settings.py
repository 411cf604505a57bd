"""The settings of a run. They live at the coordinator and reach the nodes in Welcome. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

CODECS = ("fp32", "bf16", "int8")
OUTER_OPTIMIZERS = ("nesterov", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The built-in Llama-style byte-level language model. Ignored by sites that run a script of their own."""

    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    """Heads of keys and values (grouped-query attention)."""
    ffn_dim: int = 384
    """Width of the SwiGLU feed-forward."""
    vocab_size: int = 256
    """One token for each byte."""
    max_sequence: int = 128
    """Longest sequence, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The built-in trainer: AdamW, warm-up, cosine decay to a tenth over the run's length."""

    batch_size: int = 8
    """Sequences a step and site."""
    sequence: int = 128
    """Bytes a sequence."""
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    ramp_steps: int = 20
    """After joining or a restart the learning rate rises over this many steps; 0 turns it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    every: int = 20
    """H: inner steps between two syncs."""
    codec: str = "int8"
    """fp32, bf16 or int8: how pseudo-gradients and their averages travel."""
    zstd_level: int = 0
    """zstandard level of the stage behind the codec; 0 leaves it out."""
    chunk_elements: int = 1 << 20
    """Elements of a chunk: the unit that is sent, reduced, hashed and repaired."""
    log_commits: int = 32
    """Payloads of this many commits stay on each site's disk."""
    fsync: bool = False
    """Wait for the disk before Done. Without it a process crash loses nothing; a power cut may cost a site its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    optimizer: str = "nesterov"
    """nesterov or sgd."""
    learning_rate: float = 1.0
    momentum: float = 0.5
    """Below about 50 syncs use 0 to 0.5; 0.9 (with learning rate 0.7) is for thousands of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that the sites of a run share."""

    run_id: str
    """Names the run; every message carries it."""
    seed: int = 1
    """Of the model's first values and of the samples each site draws."""
    data: str = "stdlib"
    """Name of the data set. All sites must have the same files, unless it is "local"; "stdlib" is the source of
    Python's own standard library."""
    steps: int = 300
    """Length of the run in inner steps of each site; 0 if `tokens` says it."""
    tokens: int = 0
    """Length of the run in tokens of all sites; 0 if `steps` says it."""
    min_sites: int = 1
    """Training starts when so many sites hold the starting state."""
    quorum: int = 1
    """A sync commits with at least so many contributors."""
    time_limits: str = "lan"
    """local, lan or wan: how patient the run is."""
    save_every: int = 0
    """Sites save the model every so many commits, and always at the end; 0 is only at the end."""
    overrun_steps: int = 0
    """With the coordinator away, sites train at most so many steps beyond a boundary; 0 is as many as `sync.every`."""
    model: ModelSettings = field(default_factory=ModelSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
