"""Packed tokens, and shards of streams."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="a shard counts as it is begun",
        rule="a shard counts with the first step after the loop has asked for the next one",
        where="node.worker.loader:shards",
        old="        yield int(shard)\n        batches.give_out()\n",
        new="        batches.give_out()\n        yield int(shard)\n",
        tests=("tests/unit/worker/test_worker_loader.py",),
    ),
    Mutation(
        name="shards are leased by steps",
        rule="a site leases the shard in progress and the next one, however many steps a window has",
        where="node.core.leases:announced",
        old="0 if event.of_shards else event.round_samples",
        new="event.round_samples",
        tests=("tests/unit/node_core/test_leases.py",),
    ),
    Mutation(
        name="steps are learnt of shards",
        rule="a site leases the shard in progress and the next one, however many it finishes in a window",
        where="node.core.leases:sealed",
        old="if event.step > data.step and data.per_step:",
        new="if event.step > data.step:",
        tests=("tests/unit/node_core/test_leases.py",),
    ),
    Mutation(
        name="a round counts when one rank is through with it",
        rule="a shard is listed when it is finished, whatever other ranks are at",
        where="node.core.ranks.reports:sealed_by_all",
        old="samples_used=min(",
        new="samples_used=max(",
        tests=("tests/unit/local/test_worker_group.py",),
    ),
)
