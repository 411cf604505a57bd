"""Run as a process: settings (JSON) on stdin; the built-in model's manifest and this machine's device on stdout."""

from __future__ import annotations

import json
import sys

import torch

from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer
from atoll.node.worker.tensors import find_tensors
from atoll.protocol import wire
from atoll.protocol.settings import settings_from_json


def main() -> None:
    settings = settings_from_json(sys.stdin.read())
    model = Transformer(settings.model, settings.seed)
    manifest = find_tensors([model], [make_optimizer(model, settings.trainer)]).manifest
    json.dump([wire.encode(manifest).hex(), device()], sys.stdout)


def device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return "CPU"


if __name__ == "__main__":
    main()
