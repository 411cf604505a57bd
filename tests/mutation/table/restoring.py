"""Records that sites keep for their coordinator, and an old copy of its store that is brought up to them."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

RESTORED = "tests/unit/coordinator/test_restored.py"
DEPOSITS = "tests/unit/local/test_deposits.py"
STREAMS = "tests/unit/coordinator/test_streams.py"
RESTORING = "tests/process/test_restoring.py"
GOES_ON = f"{RESTORED}::test_the_run_goes_on_from_its_newest_commit_and_each_sample_counts_once"

MUTATIONS = (
    Mutation(
        name="each part of a message counts",
        rule="23: what a site acknowledges is what the core has sent",
        where="coordinator.streams:Stream.write",
        old="self.sent_seq += is_counted",
        new="self.sent_seq += 1",
        tests=(f"{STREAMS}::test_parts_of_a_message_count_as_one_and_deposits_as_none",),
    ),
    Mutation(
        name="what was leased when the store was lost stays leased",
        rule="6: what no site has kept is not known, so nobody goes on with it",
        where="coordinator.core.restored:settled",
        old="        run.remove(site, REASON, evicted=True)\n",
        new="        pass\n",
        tests=(GOES_ON,),
    ),
    Mutation(
        name="samples of commits since the copy are open again",
        rule="each sample is counted once",
        where="coordinator.core.restored:settled",
        old="for commit in since(records):",
        new="for commit in since(records)[:0]:",
        tests=(GOES_ON,),
    ),
    Mutation(
        name="samples of commits that went back since the copy stay done",
        rule="23: the ranges of void commits are returned",
        where="coordinator.core.restored:settled",
        old="for record in voided.values():",
        new="for record in []:",
        tests=(f"{RESTORED}::test_commits_that_went_back_since_the_copy_are_void_and_their_samples_open",),
    ),
    Mutation(
        name="numbers of syncs are used again after a restore",
        rule="6, 11: a contribution is keyed by its sync, and never changes",
        where="coordinator.core.restored:settled",
        old="    run.has_used(run.last_sync + PASSED_OVER)\n",
        new="",
        tests=(GOES_ON,),
    ),
    Mutation(
        name="ids of sites are given again after a restore",
        rule="6: an id is never used again",
        where="coordinator.core.restored:settled",
        old="last_id = run.members.last_id + PASSED_OVER",
        new="last_id = run.members.last_id",
        tests=(f"{RESTORED}::test_who_came_since_the_copy_is_known_and_ids_are_not_given_again",),
    ),
    Mutation(
        name="a restored run goes on in the same branch",
        rule="23: commits that no copy has are void on every disk",
        where="coordinator.core.restored:settled",
        old="if (run.started or run.log.last) and run.finished is None:",
        new="if False:",
        tests=(GOES_ON,),
    ),
    Mutation(
        name="commits that nobody has shown are passed over",
        rule="where records are missing nothing is restored",
        where="coordinator.core.restored:missing",
        old="if n not in numbers]",
        new="if False]",
        tests=(f"{RESTORED}::test_commits_that_nobody_has_kept_are_named_with_what_was_in_them",),
    ),
    Mutation(
        name="samples are done twice in silence",
        rule="each sample is counted once",
        where="coordinator.core.data.ledger:Ledger.finish_unheard",
        old="if not line.returned.holds_all(ranges):",
        new="if False:",
        tests=(f"{RESTORED}::test_samples_that_would_count_twice_leave_the_copy_as_it_is",),
    ),
    Mutation(
        name="a term begins where the last one ended",
        rule="10: what is kept later has a higher number, also after records that left no row",
        where="coordinator.sqlite_store:SqliteStore._begin_seqs",
        old="max(self._last_seq(), term << rows.TERM_BITS)",
        new="self._last_seq()",
        tests=(f"{RESTORED}::test_with_what_a_site_keeps_a_copy_is_as_the_store_was",),
    ),
    Mutation(
        name="a restored coordinator begins the term that was the last",
        rule="10: sites refuse a lower term",
        where="coordinator.restoring:Restoring._keep",
        old="+ restored.PASSED_OVER",
        new="",
        tests=(f"{RESTORING}::test_what_no_coordinator_has_made_counts_for_nothing",),
    ),
    Mutation(
        name="what a site has altered is restored",
        rule="only a coordinator of the run makes a deposit",
        where="coordinator.restoring:Restoring._read",
        old="if not self._seal.is_whole(deposit) or deposit.seq <= self._last_seq:",
        new="if deposit.seq <= self._last_seq:",
        tests=(f"{RESTORING}::test_what_no_coordinator_has_made_counts_for_nothing",),
    ),
    Mutation(
        name="a site tells twice",
        rule="the maximum of a quorum",
        where="coordinator.restoring:Restoring._look",
        old="if has_told >= needed and not self._missing():",
        new="if has_told and not self._missing():",
        tests=(f"{RESTORING}::test_what_no_coordinator_has_made_counts_for_nothing",),
    ),
    Mutation(
        name="the seal is over the body alone",
        rule="a deposit is as its coordinator made it",
        where="protocol.deposits:Seal._of",
        old=".uints((d.seq, d.number, d.part))",
        new="",
        tests=(f"{DEPOSITS}::test_what_was_changed_is_told_whatever_of_it_was",),
    ),
    Mutation(
        name="an old record takes the place of a new one",
        rule="a later record of a key takes the place of an earlier one",
        where="node.daemon.deposit_box",
        old="WHERE excluded.seq > seq",
        new="",
        tests=(f"{DEPOSITS}::test_a_later_record_of_a_key_takes_the_place_of_an_earlier_one_and_no_other_does",),
    ),
    Mutation(
        name="a site keeps everything for ever",
        rule="what a site keeps is bounded",
        where="node.daemon.deposit_box:DepositBox.add",
        old='self._trim("kind = ?", (kind,), MAX_KEPT)',
        new="pass",
        tests=(f"{DEPOSITS}::test_it_keeps_the_newest_within_its_bounds",),
    ),
)
