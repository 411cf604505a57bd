"""A rank of a script that torchrun has started, with no node: its model and what it does of a batch.

shared_without_node.py RANK WORLD ADDRESS: the first rank prints a line of JSON, the largest differences of gradients
and loss from those of one process with the whole batch.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

import torch
import torch.distributed as dist

import atoll
from examples.own_model import BATCH, PARTS, SEQUENCE, Model, loss_of


def main(rank: int, world: int, address: str) -> None:
    host, _, port = address.rpartition(":")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": port}
    torch.manual_seed(7)
    alone = Model()
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    expected = loss_of(alone(tokens[:, :-1]), tokens[:, 1:])
    expected.backward()  # type: ignore[no-untyped-call]
    said = sys.stdout
    with redirect_stdout(sys.stderr), atoll.share(Model, loss_of, **PARTS, seed=7) as model:
        size = model.batch_size(BATCH)
        mine = tokens[model.data_rank * size : (model.data_rank + 1) * size]
        loss = model(mine[:, :-1], mine[:, 1:])
        assert loss is not None
        dist.all_reduce(loss)
        far = [
            (one.grad - other.grad).abs().max().item()
            for one, other in zip(model.parameters(), alone.parameters(), strict=True)
            if one.grad is not None and other.grad is not None
        ]
        found = {"size": size, "gradients": max(far), "loss": abs((loss / world - expected.detach()).item())}
        if rank == 0:
            said.write(json.dumps(found) + "\n")
            said.flush()
        dist.barrier()
        os._exit(0)  # gloo's threads now and then never let the interpreter end


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
