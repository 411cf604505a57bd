"""Audits where what codecs lose of averages is fed back."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CORE = "tests/unit/coordinator/test_withheld_errors.py"
SITE = "tests/unit/exchange/test_audited_errors.py"
IN_ROUNDS = f"{CORE}::test_a_reducer_that_is_silent_to_two_sites_in_three_rounds_is_evicted_and_the_third_time_banned"
HELD = f"{SITE}::test_what_a_reducer_gives_is_held_against_what_it_signed"
COUNTS = f"{SITE}::test_an_error_counts_after_its_attempt_was_signed_and_under_one_start_of_the_coordinator"
KEPT = f"{SITE}::test_what_was_added_is_given_until_its_audits_are_over"
OVER = (f"{CORE}::test_what_may_not_be_kept_any_more_is_not_asked_for_as_little_as_of_a_site_without_a_witness",)

MUTATIONS = (
    Mutation(
        name="silence to one site convicts",
        rule="a reducer is judged for silence to two sites",
        where="coordinator.core.auditing.withholding",
        old="WITNESSES = 2",
        new="WITNESSES = 1",
        tests=(f"{CORE}::test_silence_to_one_site_or_to_sites_that_cannot_reach_it_judges_nobody", IN_ROUNDS),
    ),
    Mutation(
        name="silence is judged in the first round",
        rule="three rounds, each after a commit in which the reducer exchanged with its witnesses",
        where="coordinator.core.auditing.withholding",
        old="ROUNDS = 3",
        new="ROUNDS = 2",
        tests=(IN_ROUNDS,),
    ),
    Mutation(
        name="silence is an offence",
        rule="silence is counted apart",
        where="coordinator.core.auditing.sentencing:_ask_next",
        old="Cause.SILENCE if accused.is_silent else Cause.AUDIT",
        new="Cause.AUDIT",
        tests=(IN_ROUNDS,),
    ),
    Mutation(
        name="a round does not need its witnesses in the commit",
        rule="the reducer has exchanged with both of them between the rounds",
        where="coordinator.core.auditing.withholding:committed",
        old="ids.issuperset({reducer.site_id, *audit.withheld})",
        new="True",
        tests=OVER,
    ),
    Mutation(
        name="silence may be about what is not kept any more",
        rule="a reducer keeps its errors for so many syncs",
        where="coordinator.core.auditing.withholding:_is_old",
        old="run.last_sync - audit.asked.sync > MOST_SYNCS",
        new="False",
        tests=OVER,
    ),
    Mutation(
        name="a site that was started again is silent",
        rule="the reducer is the same start throughout",
        where="coordinator.core.auditing.withholding:committed",
        old="if reducer is None or _is_old(run, audit):",
        new="if reducer is not None and _is_old(run, audit):",
        tests=(f"{CORE}::test_one_that_was_started_again_is_not_judged_and_averages_nothing_for_a_while",),
    ),
    Mutation(
        name="a reducer that is started again at each audit loses nothing by it",
        rule="it reduces nothing for some syncs",
        where="coordinator.core.auditing.withholding:undecided",
        old="        run.trouble.reduce_nothing.note([audit.reducer.site_id], run.last_sync)\n",
        new="        pass\n",
        tests=(f"{CORE}::test_one_that_was_started_again_is_not_judged_and_averages_nothing_for_a_while",),
    ),
    Mutation(
        name="a reducer need not say what it added",
        rule="Done without roots over errors is refused",
        where="coordinator.core.auditing.signed:_wrong_in_errors",
        old="if (errors is None) != (not way.error_beta_down):",
        new="if False:",
        tests=(f"{CORE}::test_a_reducer_that_says_nothing_of_its_errors_is_refused",),
    ),
    Mutation(
        name="what reducers signed before is forgotten",
        rule="an audit says what the reducer had signed of the commit before",
        where="coordinator.core.auditing.left_over:note",
        old="if one is not None and one.errors is not None}",
        new="if one is None}",
        tests=(f"{CORE}::test_an_audit_says_what_its_reducer_had_signed_of_the_average_before",),
    ),
    Mutation(
        name="an error may be made up",
        rule="what is added is what was left by the last commit",
        where="node.exchange.added_errors:_check_earlier",
        old="        _check_within(before.made.errors.after, chunks, chunk, given.before_hash, given.earlier_proof)\n",
        new="",
        tests=(f"{SITE}::test_an_error_that_was_made_up_is_not_what_was_left_before",),
    ),
    Mutation(
        name="each auditor may be given another error",
        rule="the hash of what was added is signed with Done",
        where="node.exchange.added_errors:checked",
        old="        _check_within(errors.before, chunks, chunk, given.before_hash, given.before_proof)\n",
        new="",
        tests=(HELD,),
    ),
    Mutation(
        name="an error that does not have its hash counts",
        rule="what is given is what was signed",
        where="node.exchange.added_errors:checked",
        old=" or payload_hash(given.error) != given.before_hash",
        new="",
        tests=(HELD,),
    ),
    Mutation(
        name="an auditor believes what the codec left",
        rule="payload and left error are both computed",
        where="node.exchange.added_errors:found_hash",
        old=".data(left)",
        new="",
        tests=(f"{SITE}::test_what_an_auditor_keeps_shows_what_a_reducer_made_of_its_error",),
    ),
    Mutation(
        name="an error of another term counts",
        rule="a restart of the coordinator leaves no error that nobody can check",
        where="node.exchange.sync.audited_errors:AuditedErrors.counting",
        old=" and attempt.term == term",
        new="",
        tests=(COUNTS,),
    ),
    Mutation(
        name="an error that has changed in memory is added",
        rule="what is added is what was signed",
        where="node.exchange.sync.audited_errors:AuditedErrors.whole",
        old="and hash_of(error) == note.after",
        new="",
        tests=(COUNTS,),
    ),
    Mutation(
        name="what was added is dropped with the commit",
        rule="it is kept until its audits are over",
        where="node.exchange.sync.audited_errors:AuditedErrors.expired",
        old="most = KEPT_SYNCS + self.num_in_flight",
        new="most = -1",
        tests=(KEPT,),
    ),
    Mutation(
        name="errors are kept for ever",
        rule="what a reducer holds is bounded",
        where="node.exchange.sync.audited_errors:AuditedErrors.expired",
        old="if newest - since > most]",
        new="if False]",
        tests=(KEPT,),
    ),
    Mutation(
        name="evidence need not say with which beta",
        rule="what evidence says of errors, the reducer has signed",
        where="protocol.trust.words:of_errors",
        old=".text(repr(float(beta)))",
        new="",
        tests=(f"{SITE}::test_what_an_auditor_keeps_shows_what_a_reducer_made_of_its_error",),
    ),
    Mutation(
        name="evidence may hold any error",
        rule="what evidence says of errors, the reducer has signed",
        where="node.dataplane.false_payload:_error",
        old="        check_proof(root, found.num_payloads, found.payload_place, found.asked.chunk, hash, proof)\n",
        new="        pass\n",
        tests=(f"{SITE}::test_what_an_auditor_keeps_shows_what_a_reducer_made_of_its_error",),
    ),
)
