"""The ranks of a site in a mesh of as many dimensions as they share a model in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from atoll.node.parallel.settings import DIMENSIONS, ParallelSettings


@dataclass(frozen=True, slots=True)
class Mesh:
    """Of one rank's site. A dimension of one rank has no part in it: `of` gives None."""

    whole: DeviceMesh
    settings: ParallelSettings
    """With a size for each dimension."""
    of_fsdp: DeviceMesh | None
    """One dimension, of shards; or two for HSDP, replicas first. None if every data rank has the whole model. Ranks
    that share a sequence have shards too, as each has another part of the gradients."""
    ep: DeviceMesh | None
    """Neighbours among the shards, which have different experts; None if each rank has all."""
    of_experts: DeviceMesh | None
    """As `of_fsdp`, of the ranks that have the same experts; None if each rank has all."""
    collective_s: float | None = None
    """The limit of collectives; None: torch's own."""

    @classmethod
    def of_site(cls, device: torch.device, settings: ParallelSettings, collective_s: float | None = None) -> Mesh:
        """A process group of all ranks must be there. `settings` have a size for each dimension. `collective_s`: the
        limit of collectives; torch gives groups of a mesh its own, whatever that of all ranks has."""
        mesh = replace(cls._of_site(device, settings), collective_s=collective_s)
        for part in (mesh.whole, mesh.of_fsdp, mesh.ep, mesh.of_experts):
            if part is not None:
                mesh.limit(part)
        return mesh

    @classmethod
    def _of_site(cls, device: torch.device, settings: ParallelSettings) -> Mesh:
        sizes = tuple(getattr(settings, name) for name in DIMENSIONS)
        whole = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
        shards = whole["dp_shard"]
        if settings.cp > 1:
            shards = whole["dp_shard", "cp"]._flatten("dp_shard_cp")
        of_fsdp = _with_replicas(whole, shards, settings) if settings.is_sharded or settings.dp_replicate > 1 else None
        if settings.ep == 1:
            return cls(whole, settings, of_fsdp, None, None)
        parts = shards._unflatten(0, (shards.size() // settings.ep, settings.ep), ("dp_shard_of_experts", "ep"))
        of_experts = _with_replicas(whole, parts["dp_shard_of_experts"], settings)
        return cls(whole, settings, of_fsdp, parts["ep"], of_experts)

    def limit(self, part: DeviceMesh) -> None:
        """A part of this mesh that was cut anew has groups of its own."""
        if self.collective_s is not None:
            for group in part.get_all_groups():
                _set_pg_timeout(timedelta(seconds=self.collective_s), group)

    def of(self, name: str) -> DeviceMesh | None:
        """None if one rank has no other to share in this dimension."""
        return self.whole[name] if getattr(self.settings, name) > 1 else None

    @property
    def data_rank(self) -> int:
        """Ranks of one share of the batch have the same, those too that share its sequences."""
        return self._at("dp_replicate") * self.settings.dp_shard + self._at("dp_shard")

    @property
    def stage(self) -> int:
        """Place of this rank in the pipeline."""
        return self._at("pp")

    def _at(self, name: str) -> int:
        return self.whole.get_local_rank(name)


def _with_replicas(whole: DeviceMesh, shards: DeviceMesh, settings: ParallelSettings) -> DeviceMesh:
    return DeviceMesh._concatenate([whole["dp_replicate"], shards]) if settings.dp_replicate > 1 else shards
