"""A saved model as the built-in trainer's runs leave it, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.node.dataplane.saved_manifest import SavedManifest, to_json
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.settings import RunSettings, settings_to_json


def save(folder: Path, settings: RunSettings, model: torch.nn.Module) -> Path:
    tensors = find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    listed = {spec.name for spec in tensors.manifest.tensors}  # tied names are not saved twice
    save_file({n: t for n, t in model.state_dict().items() if n in listed}, folder / "model.safetensors")
    saved = SavedManifest(
        run_id="r",
        commit=1,
        run_step=2,
        run_tokens=3,
        state_hash=bytes(32),
        chunk_elements=1,
        slots=(),
        manifest=tensors.manifest,
        info={"settings": json.loads(settings_to_json(settings))},
    )
    (folder / "manifest.json").write_text(to_json(saved))
    return folder
