"""A model, shared by the ranks of a site as its settings say. The order of the steps matters, and is all in view."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from atoll.node.parallel.context import Context
from atoll.node.parallel.experts import sharded_dimension, share_experts
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.settings import ParallelSettings

KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective checkpointing does not compute again."""


Divide = Callable[[nn.Module, list[nn.Module], DeviceMesh], None]
"""Of a model and its blocks, by tensor parallelism: in place, matrices among the ranks of a mesh of one dimension."""


def parallelize(
    model: nn.Module,
    settings: ParallelSettings,
    mesh: Mesh | None,
    divide: Divide,
    *,
    blocks: str = "layers",
    casts_inputs: bool = False,
    context: Context | None = None,
) -> nn.Module:
    """The same model, or DDP around it. `blocks` is the name of a list or dictionary of modules in it; it is on its
    device, or on meta. `mesh`: None where a rank is alone. `casts_inputs`: with bf16, of the blocks under FSDP2.

    1. Tensor parallelism, with it sequence parallelism, and expert parallelism: shares in the place of matrices.
    2. Context parallelism, which replaces what attends.
    3. Activation checkpointing, around blocks.
    4. Compilation of each block, with what the steps before have made of it.
    5. Data parallelism: DDP, FSDP2 or HSDP, over what the steps before have left.
    """
    layers = model.get_submodule(blocks)
    if mesh is not None and (tp := mesh.of("tp")) is not None:
        divide(model, list(layers.children()), tp)
    experts = share_experts(layers.children(), mesh, context) if mesh is not None else []
    if context is not None:
        for block in layers.children():
            block.attention.attend = context.attend  # type: ignore[union-attr]
    if settings.checkpointing != "none":
        kept: dict[str, Any] = {}
        if settings.checkpointing == "selective":
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        for name, block in list(layers.named_children()):
            layers.register_module(name, checkpoint_wrapper(block, **kept))
    if settings.compile:
        for block in layers.children():
            block.compile()
        if settings.tp > 1 and isinstance(embedding := getattr(model, "embedding", None), nn.Module):
            embedding.register_forward_hook(_arrived)
    if mesh is None or mesh.of_fsdp is None or not settings.has_fsdp:
        return model if mesh is None or settings.dp_replicate == 1 else DistributedDataParallel(model)
    gives_up = settings.is_sharded and settings.zero == 3
    # What a root module returns may be a view, which nobody changes in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    low = torch.bfloat16 if settings.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32, cast_forward_inputs=casts_inputs)
    place = OffloadPolicy()
    if settings.offload:
        place = CPUOffloadPolicy(pin_memory=mesh.of_fsdp.device_type == "cuda")
    for module in (*experts, *layers.children(), model):
        ranks = mesh.of_experts if module in experts else mesh.of_fsdp
        assert ranks is not None
        fully_shard(
            module,
            mesh=ranks,
            mp_policy=policy,
            offload_policy=place,
            reshard_after_forward=gives_up,
            shard_placement_fn=partial(sharded_dimension, num_shards=ranks.size(-1)),
        )
    return model


def _policy(context: object, operation: object, *args: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _arrived(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """A plain tensor. In torch 2.13 the gradient of one that a collective still brings does not find its way back from
    a compiled block."""
    return output.clone()
