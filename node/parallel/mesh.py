"""The ranks of a site in a mesh of as many dimensions as they share a model in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.node.parallel.settings import DIMENSIONS, ParallelSettings


@dataclass(frozen=True, slots=True)
class Mesh:
    """Of one rank's site. A dimension of one rank has no part in it: `of` gives None."""

    whole: DeviceMesh
    settings: ParallelSettings
    """With a size for each dimension."""

    @classmethod
    def of_site(cls, device: torch.device, settings: ParallelSettings) -> Mesh:
        """A process group of all ranks must be there. `settings` have a size for each dimension."""
        sizes = tuple(getattr(settings, name) for name in DIMENSIONS)
        return cls(init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS), settings)

    def of(self, name: str) -> DeviceMesh | None:
        """None if one rank has no other to share in this dimension."""
        return self.whole[name] if getattr(self.settings, name) > 1 else None

    @property
    def of_fsdp(self) -> DeviceMesh | None:
        """One dimension, of shards; or two for HSDP, replicas first. None if every data rank has the whole model."""
        if self.settings.dp_replicate > 1:
            return self.whole["dp_replicate", "dp_shard"]
        return self.of("dp_shard")

    @property
    def data_rank(self) -> int:
        """Ranks of one share of the batch have the same."""
        return self._at("dp_replicate") * self.settings.dp_shard + self._at("dp_shard")

    @property
    def stage(self) -> int:
        """Place of this rank in the pipeline."""
        return self._at("pp")

    def _at(self, name: str) -> int:
        return self.whole.get_local_rank(name)
