"""One plan of a run: all that `atoll plan` says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from atoll.node.plan.bubbles import bubbles
from atoll.node.plan.layouts import GPUS_OF_HOST, RESERVE, LayoutPlan, Site, layouts, reason
from atoll.node.plan.node_needs import NodeNeeds, node_needs
from atoll.node.plan.rank_memory import MOMENTS_BYTES
from atoll.node.plan.syncs import STRATEGIES, Link, SyncPlan, advice, recommended, settings_of, sync_plans
from atoll.node.plan.tensors import active_parameters, manifest_of, parameters_by_part
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import MODELS, ModelSettings, TrainerSettings, check_model
from atoll.protocol.strict import nearest

ACHIEVED = 0.4
"""Of a GPU's peak rate, by the operations of training, without what a layout loses."""
USUAL_SEQUENCE = 4096
SEQUENCES_OF_GPU = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    model: str
    num_gpus: int
    gpu_bytes: int
    """Of each GPU."""
    link: Link
    batch: int | None
    sequence: int | None
    flops: float
    """A second and GPU, at its peak."""
    step_s: float | None
    """None: computed."""
    precision: str
    every: int | None
    strategies: tuple[str, ...]
    """None named: all that can have this H."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    question: Question
    settings: ModelSettings
    parameters: dict[str, int]
    site: Site
    layouts: list[LayoutPlan]
    reason: str
    """Of the first layout."""
    bubbles: dict[int, dict[str, float]]
    """By ranks of the pipeline and schedule, with four microbatches a rank."""
    step_s: float
    node_of: str
    """The strategy whose node this is."""
    node: NodeNeeds
    copies_bytes: int
    """Of the inner optimizer's state, in the host's memory, for checkpoints: what ranks have alike once."""
    offloaded_bytes: int
    """Weights, gradients and moments in the host's memory, of all ranks."""
    syncs: list[SyncPlan]
    """Empty of a single site, which sends nothing."""

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def num_active(self) -> int:
        """That a token goes through."""
        return active_parameters(self.settings)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        best, every, why = recommended(self.syncs) if self.syncs else (None, 0, "")
        return {
            "question": asdict(self.question),
            "model": asdict(self.settings),
            "parameters": {"total": self.num_parameters, "active": self.num_active, **self.parameters},
            "step": {
                "batch": self.site.batch,
                "sequence": self.site.sequence,
                "compute_s": self.site.compute_s,
                "step_s": self.step_s,
            },
            "usable_bytes": self.site.usable_bytes,
            "layouts": [asdict(plan) | {"parallel": str(plan.settings)} for plan in self.layouts],
            "recommended": {"parallel": str(self.layouts[0].settings), "reason": self.reason},
            "bubbles": self.bubbles,
            "node": {
                "strategy": self.node_of,
                "memory_bytes": self.node.footprint.memory_bytes,
                "shared_bytes": self.node.footprint.shared_bytes,
                "reads_in_place": self.node.footprint.reads_in_place,
                "copies_bytes": self.copies_bytes,
                "offloaded_bytes": self.offloaded_bytes,
                "disk_bytes": self.node.footprint.disk_bytes,
                "disk": dict(self.node.footprint.disk_parts),
                "written_bytes": self.node.written_bytes,
                "written": dict(self.node.written),
            },
            "syncs": [asdict(sync) | {"advice": advice(sync)} for sync in self.syncs],
            "recommended_sync": best and {"name": best.name, "every": every, "reason": why},
        }


def plan(question: Question) -> RunPlan:
    """Raises ConfigError for what makes no run, naming the option to change."""
    if question.model not in MODELS:
        raise ConfigError(f'--model "{question.model}"; {nearest(question.model, MODELS)}')
    model = MODELS[question.model]
    sequence = question.sequence or min(USUAL_SEQUENCE, model.max_sequence)
    batch = question.batch or SEQUENCES_OF_GPU * question.num_gpus
    model = replace(model, max_sequence=max(model.max_sequence, sequence))
    check_model(model, TrainerSettings(batch_size=batch, sequence=sequence))
    parameters = parameters_by_part(model)
    # 6 N D: arXiv 2001.08361, section 2.1, with what a token goes through; attention to the tokens before: arXiv
    # 2204.02311, appendix B, of which half is masked
    operations = 6 * (active_parameters(model) + model.num_layers * model.dim * sequence) * batch * sequence
    compute_s = operations / (question.num_gpus * question.flops * ACHIEVED)
    site = Site(
        model=model,
        num_gpus=question.num_gpus,
        gpu_bytes=question.gpu_bytes,
        batch=batch,
        sequence=sequence,
        precision=question.precision,
        compute_s=compute_s,
    )
    found = layouts(site)
    best = found[0]
    step_s = question.step_s or best.step_s
    manifest = manifest_of(model)
    runs = _runs(question)
    node_of = next(iter(runs))
    # GPUs are given copies; ranks of one host whose parameters are on the CPU read in place, of a local disk.
    in_host_memory = best.settings.offload == 1 and question.num_gpus <= GPUS_OF_HOST
    return RunPlan(
        question=question,
        settings=model,
        parameters=parameters,
        site=site,
        layouts=found,
        reason=reason(found),
        bubbles={num: bubbles(num, 4 * num) for num in (2, 4, 8) if num <= min(question.num_gpus, GPUS_OF_HOST)},
        step_s=step_s,
        node_of=node_of,
        node=node_needs(manifest, runs[node_of], read_in_place=in_host_memory),
        copies_bytes=MOMENTS_BYTES * manifest.num_trainable,
        offloaded_bytes=best.settings.offload
        * question.num_gpus
        * (best.memory.weights + best.memory.gradients + best.memory.optimizer),
        syncs=[
            found
            for name, run in runs.items()
            if question.link.num_sites > 1
            for found in sync_plans(name, run.sync, manifest, question.link, step_s)
        ],
    )


def _runs(question: Question) -> dict[str, Any]:
    names: Sequence[str] = question.strategies or STRATEGIES
    runs = {}
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f'--strategy "{name}"; {nearest(name, STRATEGIES)}')
        try:
            runs[name] = settings_of(name, question.link.num_sites, question.every)
        except ConfigError:
            if question.strategies:
                raise
    return runs


ASSUMED = (
    f"a step computes 6 operations a token and parameter that it goes through, and attention, at {ACHIEVED:g} of the "
    "GPUs' peak",
    f"a tenth ({RESERVE:g}) of each GPU's memory is for CUDA, NCCL and what the allocator cannot use",
    "links carry their rate both ways; bytes are those before zstd, with the headers of TCP segments",
    "a sync has no time for encoding and averaging: syncs measured on links took at least 14 % longer than planned",
)
