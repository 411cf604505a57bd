"""Seeded schedules of faults on simulated time, against the real coordinator, node and data plane.

    python -m tests.simulation                      5,000 schedules on all cores
    python -m tests.simulation --first 100 --num 50
    python -m tests.simulation --seed 246           one schedule, with its story
    python -m tests.simulation --seed 246 --shrink  the fewest of its faults that still break it
    python -m tests.simulation --sites 1000         one schedule of so many sites
    python -m tests.simulation --flips              with audits, and a bit that flips at every site: nobody is banned

A schedule is one run of some sites with faults drawn from the seed: see tests/simulation/faults.py for the faults,
large.py for the schedule of very many sites, checks.py for what must hold. The same seed is the same schedule. Exit
code 1 if a schedule is unsound.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tests.simulation.audits import with_flips
from tests.simulation.faults import Fault, draw_faults, strike
from tests.simulation.large import LEAST_SITES, large
from tests.simulation.world import Outcome, Shape, draw_shape_of, in_gradients, in_tokens, play

SAY_EVERY_S = 10.0
STORY_LINES = 60


def one(seed: int, faults: Sequence[Fault] | None = None, shape: Shape | None = None) -> Outcome:
    """The schedule of that seed, or with other faults, or of another shape."""
    chosen = draw_faults(seed) if faults is None else faults
    return play(seed, lambda world: strike(world, chosen), shape or drawn(seed))


def drawn(seed: int) -> Shape:
    """A sixth of the schedules exchange gradients. Of the others a tenth are as long as a number of tokens."""
    shape = draw_shape_of(seed)
    if random.Random(f"strategy {seed}").random() < 1 / 6:
        return in_gradients(shape, seed)
    return in_tokens(shape, seed) if random.Random(f"tokens or steps {seed}").random() < 1 / 10 else shape


def _briefly(seed: int) -> Outcome:
    """Without the story if all is well: there are thousands."""
    outcome = one(seed)
    return outcome if outcome.problem else replace(outcome, story="")


def shrink(seed: int) -> tuple[Fault, ...]:
    """Faults of the schedule that are enough to break it."""
    faults = list(draw_faults(seed))
    index = 0
    while index < len(faults):
        fewer = faults[:index] + faults[index + 1 :]
        if one(seed, fewer).problem:
            faults = fewer
        else:
            index += 1
    return tuple(faults)


def many(seeds: Iterable[int], num: int, jobs: int, play_one: Callable[[int], Outcome] = _briefly) -> list[Outcome]:
    """Runs them all and prints progress and a summary; the outcomes that are unsound."""
    began_s = said_s = time.monotonic()
    faults: Counter[str] = Counter()
    unsound: list[Outcome] = []
    num_done = num_commits = num_events = 0
    simulated_s = 0.0
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        for outcome in pool.imap_unordered(play_one, seeds, chunksize=5):
            num_done += 1
            num_commits += outcome.num_commits
            num_events += outcome.num_events
            simulated_s += outcome.simulated_s
            faults += outcome.num_faults
            if outcome.problem:
                unsound.append(outcome)
                say(f"seed {outcome.seed}: {outcome.problem}")
                say("\n".join(outcome.story.splitlines()[-STORY_LINES:]))
                of_flips = " --flips" if play_one is with_flips else ""
                say(f"again: python -m tests.simulation{of_flips} --seed {outcome.seed}")
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"{num_done} of {num} schedules, {len(unsound)} unsound, {said_s - began_s:.0f} s")
    took_s = time.monotonic() - began_s
    say(f"{num_done} schedules in {took_s:.0f} s on {jobs} processes ({num_done / took_s:.1f} a second)")
    say(f"{num_commits} commits, {num_events} events of nodes, {simulated_s / 3600:.1f} h of simulated time")
    say("faults: " + ", ".join(f"{count} {kind}" for kind, count in faults.most_common()))
    say(f"{len(unsound)} unsound" + "".join(f", seed {o.seed}" for o in sorted(unsound, key=lambda o: o.seed)))
    return unsound


def one_large(num_sites: int, seed: int) -> Outcome:
    """Prints progress and a summary, and the end of the story if it is unsound."""
    began_s = time.process_time()
    outcome = large(num_sites, seed, say)
    if outcome.problem:
        say("\n".join(outcome.story.splitlines()[-STORY_LINES:]))
    say(
        f"{num_sites} sites, {outcome.num_events} events of nodes, {outcome.simulated_s:.1f} s of simulated time in "
        f"{time.process_time() - began_s:.0f} s of CPU"
    )
    say("faults: " + ", ".join(outcome.num_faults))
    say(outcome.problem or f"sound: {outcome.num_commits} commits")
    return outcome


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=5000, help="schedules (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.add_argument("--seed", type=int, help="one schedule, with its story")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out faults that it does not need")
    parser.add_argument("--sites", type=int, default=0, help="one schedule of so many sites, 30 at least")
    parser.add_argument("--flips", action="store_true", help="schedules with audits and flipped bits")
    options = parser.parse_args(argv)
    if options.sites:
        if options.sites < LEAST_SITES:
            parser.error(f"--sites {options.sites}: fewer than {LEAST_SITES} are in the ordinary schedules")
        return 1 if one_large(options.sites, options.seed or 0).problem else 0
    if options.seed is None:
        seeds = range(options.first, options.first + options.num)
        return 1 if many(seeds, options.num, options.jobs, with_flips if options.flips else _briefly) else 0
    seed = options.seed
    if options.flips:
        return 1 if many([seed], 1, 1, with_flips) else 0
    faults = shrink(seed) if options.shrink else draw_faults(seed)
    outcome = one(seed, faults)
    say(outcome.story)
    for fault in faults:
        say(f"fault: {fault}")
    say(f"seed {seed}: {outcome.problem or f'sound: {outcome.num_commits} commits'}")
    return 1 if outcome.problem else 0


if __name__ == "__main__":
    sys.exit(main())
