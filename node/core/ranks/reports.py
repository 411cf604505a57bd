"""What the ranks report of one snapshot, held against each other: together it is what the site contributes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from atoll.node.core.events import SnapshotSealed
from atoll.node.core.ranks.pieces import SharedSlice, box_text
from atoll.node.local_protocol import DataSet, SealedReport
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.outer import same_rates
from atoll.protocol.sample_order import MAX_SAMPLES

MAX_BATCH = 1 << 24
SAME_LOSS = 1e-3
"""Ranks that share a batch may sum it up in another order, in few bits."""
LEAST_LOSS = 1e-6
"""So much two losses near zero may differ by the order of a sum."""


def check_report(
    rank: int, report: SealedReport, *, data_rank: int, hashed: Sequence[int], max_tokens: int, max_samples: int
) -> None:
    """Raises InvalidMessage if one rank alone cannot have come to that. `hashed`: pieces whose hashes are wanted."""
    if report.data_rank != data_rank:
        raise InvalidMessage(f"rank {rank} joined as data rank {data_rank}, not {report.data_rank}")
    if [h.piece for h in report.hashes] != list(hashed):
        raise InvalidMessage(
            f"rank {rank} sent hashes of {len(report.hashes)} pieces at step {report.step}, {len(hashed)} are wanted"
        )
    if report.tokens >= max_tokens:
        raise InvalidMessage(f"rank {rank} says it trained {report.tokens} tokens, which is impossible")
    if report.num_samples_used > max_samples:
        raise InvalidMessage(
            f"rank {rank} says it used {report.num_samples_used} samples, its share of what was given is {max_samples}"
        )
    if report.train_s < 0:
        raise InvalidMessage(f"rank {rank} trained for {report.train_s} s")


def wrong_in_data(rank: int, data: DataSet, first_rank: int, first: DataSet) -> str:
    """Why the ranks cannot draw together, or nobody could lease so much; empty if they can."""
    if data.num_samples > MAX_SAMPLES or max(data.batch_size, data.batches_ahead) > MAX_BATCH:
        return (
            f"rank {rank} loads {data.num_samples} samples in batches of {data.batch_size}, {data.batches_ahead} "
            f"of them ahead; at most {MAX_SAMPLES} samples, batches of {MAX_BATCH} and {MAX_BATCH} of them ahead "
            "are possible: give site.loader a smaller batch_size, num_workers or prefetch_factor"
        )
    if data.of_shards != first.of_shards:
        return f"one of ranks {first_rank} and {rank} has a site.loader, the other site.shards: give all the same"
    if (data.num_samples, data.batch_size) != (first.num_samples, first.batch_size):
        return (
            f"rank {rank} loads {data.num_samples} samples in batches of {data.batch_size}, rank {first_rank} "
            f"{first.num_samples} in batches of {first.batch_size}: the ranks of a site must load the same data "
            "in batches of the same size"
        )
    return ""


def sealed_by_all(
    generation: int, reports: Sequence[SealedReport], loaders: Mapping[int, DataSet]
) -> SnapshotSealed | str:
    """`reports` by rank, of one step; `loaders`: what the ranks draw that draw samples. Or why the reports contradict.

    Of shards the rounds count that all ranks are through with."""
    step, skips_alike = reports[0].step, _skip_alike(reports)
    tokens: dict[int, tuple[int, int]] = {}  # data rank -> tokens, first rank
    for rank, report in enumerate(reports):
        count, first_rank = tokens.setdefault(report.data_rank, (report.tokens, rank))
        if count != report.tokens and skips_alike:
            return (
                f"ranks {first_rank} and {rank} share data rank {report.data_rank} but count {count} and "
                f"{report.tokens} tokens at step {step}; ranks that see the same batch must count the same"
            )
    steps = {r.num_steps: rank for rank, r in enumerate(reports) if r.num_steps}
    if len(steps) > 1:
        told = ", ".join(f"rank {rank} {count}" for count, rank in steps.items())
        return f"ranks report different numbers of steps at step {step}: {told}"
    for rank, report in enumerate(reports):
        if not same_rates(report.rates, reports[0].rates):
            return (
                f"ranks 0 and {rank} have optimizers with different rates at step {step}: "
                f"{list(reports[0].rates)} and {list(report.rates)} (learning rate and weight decay of each group)"
            )
    if text := _unequal_use(reports, loaders):
        return text
    # Each data rank once, by its ranks that know the loss (in a pipeline: the last stage).
    said: dict[int, tuple[float, int]] = {}  # data rank -> loss, first rank
    for rank, report in enumerate(reports):
        if report.num_steps:
            loss = report.loss_sum / report.num_steps
            known, first_rank = said.setdefault(report.data_rank, (loss, rank))
            if not math.isclose(loss, known, rel_tol=SAME_LOSS, abs_tol=LEAST_LOSS):
                return (
                    f"ranks {first_rank} and {rank} share data rank {report.data_rank} but say losses of {known:.6g} "
                    f"and {loss:.6g} at step {step}; ranks that see the same batch have one loss: give site.step the "
                    "mean over all of it, or none on ranks that do not have it"
                )
    losses = [loss for loss, _ in said.values()]
    return SnapshotSealed(
        generation=generation,
        step=step,
        tokens=sum(count for count, _ in tokens.values()) if skips_alike else 0,
        num_steps=max(r.num_steps for r in reports),
        mean_loss=sum(loss / len(losses) for loss in losses),
        train_s=max(r.train_s for r in reports),
        samples_used=min((reports[rank].num_samples_used for rank in loaders), default=0) * len(tokens),
        rates=reports[0].rates,
        of_shards=any(data.of_shards for data in loaders.values()),
    )


def _skip_alike(reports: Sequence[SealedReport]) -> bool:
    """Whether all ranks have the gradients of the same steps in it; else the whole is of no use, as of shards one rank
    alone may find that they are not finite."""
    return len({report.skipped_steps for report in reports}) == 1


def _unequal_use(reports: Sequence[SealedReport], loaders: Mapping[int, DataSet]) -> str:
    """Every data rank trains on its share of the same positions, or the account would be wrong in silence."""
    used = {reports[rank].num_samples_used: rank for rank in loaders}
    if len(used) > 1 and not any(data.of_shards for data in loaders.values()):
        told = ", ".join(f"rank {rank} {count}" for count, rank in sorted(used.items()))
        return f"ranks have used different numbers of samples: {told}; all must draw as many batches a step"
    without = sorted({r.data_rank for r in reports} - {reports[rank].data_rank for rank in loaders})
    if loaders and used.keys() != {0} and without:
        return (
            f"no rank with data rank {without[0]} has a site.loader, others have: its share of the samples would "
            "be left out; give ranks that see the same batch the same data_rank"
        )
    return ""


def differing_replicas(reports: Sequence[SealedReport], slices: Iterable[SharedSlice], where: object) -> str:
    """Why the copies of a slice are not one; empty if they are. The owner's hash is of what it wrote into SNAPSHOT."""
    if not _skip_alike(reports):
        return ""
    hashes = [{h.piece: h.hash for h in report.hashes} for report in reports]
    for shared in slices:
        by_hash: dict[bytes, list[int]] = {}
        for holder in shared.holders:
            by_hash.setdefault(hashes[holder.rank][holder.piece], []).append(holder.rank)
        if len(by_hash) > 1:
            owner, *others = (in_words(ranks) for ranks in by_hash.values())
            return (
                f"the copies of {shared.name!r} {box_text(shared.box)} have drifted apart at {where}: {owner} "
                f"(whose copy is the site's) differs from {' and from '.join(others)}; ranks that hold the same "
                "parameters must update them alike: reduce gradients between them before optimizer.step(), and "
                "give all of them the same optimizer, learning rate and gradient clipping"
            )
    return ""


def in_words(ranks: Iterable[int], what: str = "rank") -> str:
    """`rank 3`, or `ranks 1, 2`."""
    listed = [str(r) for r in sorted(ranks)]
    return f"{what}{'' if len(listed) == 1 else 's'} {', '.join(listed)}"


def tokens_once(said: Iterable[tuple[int, int]]) -> int:
    """Of data ranks and what their ranks count: those that see the same batch count it once."""
    by_data_rank: dict[int, int] = {}
    for data_rank, tokens in said:
        by_data_rank[data_rank] = max(tokens, by_data_rank.get(data_rank, 0))
    return sum(by_data_rank.values())
