"""Settings that belong together, by name: what a run.toml leaves out is filled in from its preset. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    what: str
    source: str
    sync: Mapping[str, Any]
    outer: Mapping[str, Any]

    @property
    def tables(self) -> dict[str, Mapping[str, Any]]:
        """By section of a run.toml."""
        return {"sync": self.sync, "outer": self.outer}


_DILOCO: dict[str, Any] = {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
_ADAMW: dict[str, Any] = {"optimizer": "adamw", "momentum": 0.9, "beta2": 0.95}
_MEAN: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0}

PRESETS = {
    "diloco": Preset(
        what="long windows, full precision, outer Nesterov momentum; for runs of a hundred syncs and more",
        source="arXiv 2311.08105",
        sync={"every": 500, "codec": "fp32"},
        outer=_DILOCO,
    ),
    "diloco-int4": Preset(
        what="the same with 4 bits a parameter and shorter windows",
        source="arXiv 2311.08105; 4 bits arXiv 2501.18512",
        sync={"every": 100, "codec": "int4"},
        outer=_DILOCO,
    ),
    "streaming": Preset(
        what="a part of the model at a time, in 4-bit floats, while the sites train on",
        source="arXiv 2501.18512",
        sync={
            "every": 100, "fragments": 4, "overlap_steps": 5, "merge": "mix", "alpha": 0.5, "codec": "e3m0"
        },
        outer=_DILOCO,
    ),
    "sparseloco": Preset(
        what="one value of 64, 2 bits each, what is not sent comes with the next sync; no outer momentum",
        source="arXiv 2508.15706",
        sync={"every": 15, "codec": "topk2", "error_feedback": 0.95},
        outer=_MEAN,
    ),
    "sign1-ef": Preset(
        what="1 bit up, 4 bits down, what the codec loses comes with the next sync; no outer momentum",
        source="arXiv 1901.09847",
        sync={"every": 15, "codec": "int4", "up": "sign1", "error_feedback": 1.0},
        outer=_MEAN,
    ),
    "adamw": Preset(
        what="gradients in 16 bits at every step, AdamW at the nodes; for fast links",
        source="arXiv 1711.05101",
        sync={"strategy": "gradient", "every": 1, "codec": "bf16"},
        outer=_ADAMW,
    ),
    "onebit-adam": Preset(
        what="the same for 100 steps, then momenta in 1 bit both ways, and a variance that stays",
        source="arXiv 2102.02888",
        sync={
            "strategy": "momentum", "every": 1, "warmup_commits": 100, "codec": "sign1", "error_feedback": 1.0,
            "error_feedback_down": 1.0,
        },
        outer=_ADAMW,
    ),
    "zeroone-adam": Preset(
        what="the same with ever fewer gradients in the first 100 steps, then 1 to 16 steps of a site in one exchange",
        source="arXiv 2202.06009",
        sync={
            "strategy": "momentum", "every": 1, "warmup_commits": 100, "gradient_doubling": 16, "local_doubling": 50,
            "codec": "sign1", "error_feedback": 1.0, "error_feedback_down": 1.0,
        },
        outer=_ADAMW,
    ),
    "demo": Preset(
        what="one value of 128 of a cosine transform at every step, 1 bit each, and signSGD at the nodes",
        source="arXiv 2411.19870",
        sync={"strategy": "gradient", "every": 1, "codec": "dct1", "error_feedback": 0.999},
        outer={"optimizer": "signsgd"},
    ),
}  # fmt: skip


_DECIDING = {"outer": ("optimizer", ("learning_rate", "momentum")), "sync": ("merge", ("alpha",))}
"""By section: who says another one of the first has none of the others of a preset."""


def with_preset(name: str, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of a run.toml, with what they leave out of the preset of that name. What they say counts: another
    outer optimizer than the preset's has nothing of its rates, another merge not its alpha."""
    of_preset = {section: dict(table) for section, table in PRESETS[name].tables.items()} if name in PRESETS else {}
    for section, (key, others) in _DECIDING.items():
        of_it, own = of_preset.get(section, {}), tables.get(section, {})
        if key in of_it and own.get(key, of_it[key]) != of_it[key]:
            of_preset[section] = {k: v for k, v in of_it.items() if k not in others}
    return {section: {**of_preset.get(section, {}), **tables.get(section, {})} for section in {**of_preset, **tables}}


def against_preset(name: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any, Any]]:
    """(key, what the sections say, what the preset has), where that differs."""
    return [
        (f"{section}.{key}", tables[section][key], value)
        for section, of_preset in PRESETS[name].tables.items()
        for key, value in of_preset.items()
        if tables.get(section, {}).get(key, value) != value
    ]
