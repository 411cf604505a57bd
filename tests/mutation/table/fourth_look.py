"""What a fourth look found: scripts that wait for samples, write into outer parameters and train on; bans."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

AUDITS = "tests/unit/coordinator/test_audits.py"
BANS = "tests/unit/coordinator/test_bans.py"
GROUP = "tests/unit/local/test_worker_group.py"
LEFT_OUT = "tests/unit/worker/test_left_out.py"
PIECES = "tests/unit/worker/test_worker_pieces.py"

MUTATIONS = (
    Mutation(
        name="ranks that wait for one that waits for samples hang",
        rule="a site trains on without its coordinator, and then waits",
        where="node.core.ranks.liveness:first_to_hang",
        old="            return None\n",
        new="            continue\n",
        tests=(f"{GROUP}::test_while_a_rank_waits_for_samples_none_is_watched",),
    ),
    Mutation(
        name="ranks that waited for one that waited for samples hang at once",
        rule="a site trains on without its coordinator, and then waits",
        where="node.core.ranks.group:WorkerGroup.drawn",
        old="for other in self.ranks:",
        new="for other in (status,):",
        tests=(f"{GROUP}::test_while_a_rank_waits_for_samples_none_is_watched",),
    ),
    Mutation(
        name="what a script writes into outer parameters stays where they were the local ones",
        rule="the local values come back",
        where="node.worker.pieces:SharedTensors.swap_back",
        old="value is None and not copies.are_equal(publish, held.local())",
        new="False",
        tests=(f"{PIECES}::test_swap_in_and_back",),
    ),
    Mutation(
        name="a script that trains on after the run fails its site",
        rule="a run that is over is over at all sites",
        where="node.worker.joined_site:JoinedSite._boundary",
        old="                    optimizer.leave()\n",
        new="                    pass\n",
        tests=(f"{LEFT_OUT}::test_a_script_that_trains_on_after_the_run_ends_well",),
    ),
    Mutation(
        name="a ban is of any text",
        rule="all sites keep a ban, by messages that have bounds",
        where="coordinator.core.sites.bans:ban",
        old="if not SITE_NAME.fullmatch(asked.name):",
        new="if False:",
        tests=(f"{BANS}::test_what_is_no_name_of_a_site_is_not_banned",),
    ),
    Mutation(
        name="who is banned for what it does stays by another name",
        rule="6: a ban is of a key, under whatever name that comes",
        where="coordinator.core.run:Run.ban",
        old="if site.live and site.name != record.name:",
        new="if False:",
        tests=(f"{AUDITS}::test_who_is_banned_for_what_it_does_takes_along_the_other_names_of_its_key",),
    ),
    Mutation(
        name="a second offence bans nobody who is banned for an hour",
        rule="47: the second offence bans",
        where="coordinator.core.auditing.sentencing:_judge",
        old=" or run.banned[site.name].until_s",
        new="",
        tests=(f"{AUDITS}::test_a_second_offence_bans_for_good_also_who_is_banned_for_an_hour",),
    ),
)
