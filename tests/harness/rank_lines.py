"""Ranks of a test that share a process group: started together, for all that is to be found with so many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.sockets import free_address

WORKERS = Path(__file__).parents[1] / "workers"
LIMIT_S = 200.0


def told_by(worker: str, num_ranks: int, arguments: list[str], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Lines of JSON that the first rank writes; each is started with its rank, their number, an address and these
    arguments. Fails if a rank does not end well, or not within the limit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    # Behind what is there: in a copy of the tree, its own code.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH", ""), str(WORKERS.parents[1])))
    )
    first = [sys.executable, str(WORKERS / worker)]
    address = free_address()
    ranks = [
        subprocess.Popen(
            [*first, str(rank), str(num_ranks), address, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    try:
        told = [rank.communicate(timeout=limit_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        raise AssertionError(f"not at their end after {limit_s:.0f} s\n{_errors(ranks)}") from None
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(_last(errors) for _, errors in told)
    return [json.loads(line) for line in told[0][0].splitlines()]


def _errors(ended: list[subprocess.Popen[bytes]]) -> str:
    return "\n".join(_last(rank.communicate()[1]) for rank in ended)


def _last(errors: bytes) -> str:
    return errors.decode(errors="replace")[-3000:]
