"""Reducers that are audited."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CORE = "tests/unit/coordinator/test_audits.py"
SITE = "tests/unit/node_core/test_audits.py"
DONATIONS = "tests/unit/exchange/test_donations.py"
EXCHANGE = "tests/unit/exchange/test_audits.py"
TREE = "tests/unit/protocol/test_hash_tree.py"
WORDS = "tests/unit/trust/test_words.py"

MUTATIONS = (
    Mutation(
        name="one site's word convicts a reducer",
        rule="a third site computes a difference before anybody is judged",
        where="coordinator.core.auditing.judging:_wrong",
        old="if not agreeing:",
        new="if False:",
        tests=(f"{CORE}::test_an_auditor_that_accuses_an_honest_reducer_is_judged_by_the_third_site",),
    ),
    Mutation(
        name="two sites that found different things convict a reducer",
        rule="two against one: the two have to agree",
        where="coordinator.core.auditing.judging:_wrong",
        old="if found == payload_hash and payload_hash]",
        new="]",
        tests=(f"{CORE}::test_an_accusation_alone_judges_nobody",),
    ),
    Mutation(
        name="an answer to the coordinator before answers a question of this one",
        rule="every message belongs to a term",
        where="coordinator.core.auditing.audits:Audits.draw_with",
        old="term << TERM_BITS",
        new="0",
        tests=(f"{CORE}::test_an_answer_to_the_coordinator_before_answers_no_question_of_this_one",),
    ),
    Mutation(
        name="an auditor that lies goes free",
        rule="an auditor that lies is judged as a reducer is",
        where="coordinator.core.auditing.judging:_right",
        old="    sentencing.accuse(run, audit, accused)\n",
        new="    sentencing.accuse(run, audit, [])\n",
        tests=(f"{CORE}::test_an_auditor_that_accuses_an_honest_reducer_is_judged_by_the_third_site",),
    ),
    Mutation(
        name="the first offence bans",
        rule="a first offence may be a flipped bit",
        where="coordinator.core.sites.conduct:Conduct.is_second_offence",
        old="self.offences > 1",
        new="self.offences > 0",
        tests=(f"{CORE}::test_a_reducer_that_two_sites_refute_is_evicted_and_the_second_time_banned",),
    ),
    Mutation(
        name="offences are forgotten with the coordinator",
        rule="what is held against a site survives a restart",
        where="coordinator.core.sites.conduct:Conduct.restored",
        old="        self.offences = record.offences\n",
        new="",
        tests=(f"{CORE}::test_a_reducer_that_two_sites_refute_is_evicted_and_the_second_time_banned",),
    ),
    Mutation(
        name="two chunks of one commit are two offences",
        rule="what was wrong with a site then may have spoiled several chunks",
        where="coordinator.core.sites.conduct:Conduct._is_judged",
        old="if commit <= self._judged_to:",
        new="if False:",
        tests=(f"{CORE}::test_what_was_wrong_in_several_chunks_of_a_commit_is_one_offence",),
    ),
    Mutation(
        name="whoever is asked itself owns up, whatever it says",
        rule="a lie is told from bad memory by what the site computes itself",
        where="coordinator.core.auditing.audits:Accused.owns_up",
        old="return found.outcome is outcome and payload_hash in (None, found.payload_hash)",
        new="return True",
        tests=(f"{CORE}::test_a_reducer_that_two_sites_refute_is_evicted_and_the_second_time_banned",),
    ),
    Mutation(
        name="a site without an answer is taken to own up",
        rule="silence is no defence",
        where="coordinator.core.auditing.sentencing:passed_over",
        old="Cause.AUDIT)",
        new="Cause.MEMORY)",
        tests=(f"{CORE}::test_who_says_nothing_of_use_when_it_is_asked_itself_does_not_own_up",),
    ),
    Mutation(
        name="a liar that owns up each time lies for ever",
        rule="so many flipped bits within so many commits, and no more",
        where="coordinator.core.sites.conduct:Conduct.has_too_many_faults",
        old="return len(self.faults) > MAX_FAULTS",
        new="return False",
        tests=(f"{CORE}::test_a_site_that_owns_up_has_bad_memory_which_bans_it_the_third_time",),
    ),
    Mutation(
        name="flipped bits are forgotten with the coordinator",
        rule="what is held against a site survives a restart",
        where="coordinator.core.sites.conduct:Conduct.restored",
        old="        self.faults = record.faults\n",
        new="",
        tests=(f"{CORE}::test_a_site_that_owns_up_has_bad_memory_which_bans_it_the_third_time",),
    ),
    Mutation(
        name="a flipped bit is an offence",
        rule="bad memory bans nobody at the second time",
        where="coordinator.core.auditing.sentencing:_judge",
        old="is_new = conduct.own_up(commit, newest)",
        new="is_new = conduct.offend(commit, newest)",
        tests=(f"{CORE}::test_a_site_that_owns_up_has_bad_memory_which_bans_it_the_third_time",),
    ),
    Mutation(
        name="the coordinator takes words that nobody has signed",
        rule="what is not signed by the key of its identity is refused",
        where="coordinator.core.auditing.signed:_wrong",
        old="if signature is None or not is_by(site.key_digest, word, signature):",
        new="if False:",
        tests=(f"{CORE}::test_what_is_not_signed_by_the_key_of_its_stream_is_refused",),
    ),
    Mutation(
        name="a reducer need not say what it made",
        rule="Done without a root over what was made is refused",
        where="coordinator.core.auditing.signed:wrong_in_done",
        old="if _makes_any(run, attempt, site) else",
        new="if False else",
        tests=(f"{CORE}::test_a_reducer_that_says_no_root_over_what_it_made_is_refused",),
    ),
    Mutation(
        name="signatures are lost with the coordinator",
        rule="an audit says what all have signed",
        where="coordinator.core.sync.weighing:weigh",
        old="message.signature for message in ready if message.signature",
        new="message.signature for message in () if message.signature",
        tests=(f"{CORE}::test_an_audit_says_what_all_have_signed_also_after_a_restart",),
    ),
    Mutation(
        name="an auditor goes by what the coordinator says that others said",
        rule="an auditor checks what all have signed",
        where="node.exchange.auditing:Auditor._check_words",
        old="                self.words.check(member, word, signature)\n",
        new="                pass\n",
        tests=(f"{EXCHANGE}::test_who_has_signed_is_known_without_the_coordinator",),
    ),
    Mutation(
        name="a reducer may sign other payloads than it sends",
        rule="the reducer's root is over what the auditor's log has",
        where="node.exchange.auditing:Auditor._check_words",
        old="return [] if made_tree(payloads, self._made(asked, made)).root == made.root else [made.site_id]",
        new="return []",
        tests=(f"{EXCHANGE}::test_a_reducer_that_signed_other_payloads_than_all_have_is_refuted",),
    ),
    Mutation(
        name="a right payload is shown as a false one",
        rule="evidence is of a payload that is not the average",
        where="node.dataplane.false_payload:check",
        old="if computed == found.payload_hash and",
        new="if False and",
        tests=(f"{EXCHANGE}::test_a_payload_that_is_right_shows_nothing",),
    ),
    Mutation(
        name="the weights of evidence are anybody's",
        rule="a reducer signs the weights by which it averaged",
        where="protocol.trust.words:of_payloads",
        old="(c.site_id, c.incarnation, c.tokens))",
        new="(c.site_id, c.incarnation))",
        tests=(f"{WORDS}::test_what_is_signed_of_payloads_says_of_which_attempt_and_with_which_weights",),
    ),
    Mutation(
        name="a word counts by any certificate",
        rule="a root of the run has signed who signs",
        where="protocol.trust.words:check",
        old="if not any(certificates.is_signed_by(certificate, root) for root in roots):",
        new="if False:",
        tests=(f"{WORDS}::test_a_certificate_of_another_root_another_kind_or_another_run_is_none",),
    ),
    Mutation(
        name="a start of a site signs with any key",
        rule="whoever can make certificates cannot speak for a site that has spoken",
        where="protocol.trust.words:Words.check",
        old="self._keys.setdefault((member.site_id, member.incarnation), found) != found",
        new="False",
        tests=(f"{WORDS}::test_a_start_of_a_site_signs_with_one_key_whatever_certificates_are_made",),
    ),
    Mutation(
        name="open audits are forgotten with the coordinator",
        rule="a restart of the coordinator spares no reducer",
        where="coordinator.core.auditing.judging:begin",
        old="        run.persist(record)\n",
        new="",
        tests=(f"{CORE}::test_audits_that_are_open_begin_anew_when_the_coordinator_is_back_and_sites_are_here",),
    ),
    Mutation(
        name="audits that have ended begin anew for ever",
        rule="an audit ends once",
        where="coordinator.core.auditing.asking:end",
        old="        run.persist(AuditsEndedRecord(audit.asked.commit))\n",
        new="        pass\n",
        tests=(f"{CORE}::test_audits_that_are_open_begin_anew_when_the_coordinator_is_back_and_sites_are_here",),
    ),
    Mutation(
        name="a draw that was chosen passes",
        rule="the secret is committed to before the first draw",
        where="coordinator.core.auditing.drawing:check_draws",
        old="if not committed.issuperset(secrets):",
        new="if False:",
        tests=(f"{CORE}::test_whoever_looks_later_knows_that_no_draw_was_chosen",),
    ),
    Mutation(
        name="a reducer audits itself",
        rule="an auditor did not reduce the chunk",
        where="coordinator.core.auditing.judging:_able",
        old="not in {audit.reducer.site_id, *audit.asked_site_ids}",
        new="not in audit.asked_site_ids",
        tests=(CORE,),
    ),
    Mutation(
        name="who gives nothing is judged by one word",
        rule="a contributor is found out by two sites",
        where="coordinator.core.auditing.judging:_unknown",
        old="if len(by) == 2:",
        new="if by:",
        tests=(f"{CORE}::test_who_gives_something_else_than_its_root_says_is_judged_when_two_sites_say_so",),
    ),
    Mutation(
        name="the draw does not need the secret",
        rule="no reducer knows which of its chunks will be looked at",
        where="coordinator.core.auditing.drawing:draw",
        old=".data(secret)",
        new="",
        tests=(f"{CORE}::test_a_draw_depends_on_the_secret_and_on_the_payloads_and_favours_nobody",),
    ),
    Mutation(
        name="the draw does not depend on the payloads",
        rule="it is drawn after the payloads are what they are",
        where="coordinator.core.auditing.drawing:draw",
        old=".data(payload_digest)",
        new="",
        tests=(f"{CORE}::test_a_draw_depends_on_the_secret_and_on_the_payloads_and_favours_nobody",),
    ),
    Mutation(
        name="a site is ready before what it contributes is kept",
        rule="Ready says the root over what is contributed",
        where="node.core.lanes.snapshots:ready_for",
        old="(snapshot.kept_for != open_.sync or not snapshot.root)",
        new="False",
        tests=(f"{SITE}::test_it_is_ready_when_all_is_kept_and_says_the_root",),
    ),
    Mutation(
        name="a site believes another root of its own",
        rule="the coordinator cannot say that a site contributes something else",
        where="node.core.lanes.own_word:wrong_root",
        old="if roots[place : place + 1] == (lane.snapshot.root,):",
        new="if True:",
        tests=(f"{SITE}::test_what_the_coordinator_says_that_it_contributes_is_held_against_what_it_said",),
    ),
    Mutation(
        name="a reducer takes what no root is over",
        rule="nobody sends one thing and commits to another",
        where="node.exchange.sync.roots:Roots.check",
        old="if not self._is_audited:",
        new="if True:",
        tests=(f"{EXCHANGE}::test_a_reducer_takes_what_the_root_of_its_site_is_over_and_nothing_else",),
    ),
    Mutation(
        name="an exchange ends before all roots are said",
        rule="what is audited is what was averaged",
        where="node.exchange.sync.roots:Roots.__init__",
        old="self.are_told = not self._is_audited",
        new="self.are_told = True",
        tests=(f"{EXCHANGE}::test_an_exchange_waits_until_the_coordinator_has_said_all_roots",),
    ),
    Mutation(
        name="an auditor does not check what contributors give",
        rule="a contributor's own root refutes what it gives",
        where="node.exchange.auditing:Auditor._check",
        old="            check_proof(root, len(chunks), place, asked.chunk, item.hash, item.proof)\n",
        new="",
        tests=(f"{EXCHANGE}::test_what_is_not_given_or_not_what_was_said_accuses_no_reducer",),
    ),
    Mutation(
        name="a proof of another chunk counts",
        rule="a leaf is over the chunk's number",
        where="protocol.hash_tree:_leaf",
        old=".uint(chunk)",
        new="",
        tests=(TREE,),
    ),
    Mutation(
        name="a proof may be longer than its tree is high",
        rule="a proof has the hashes that are beside the way up, and no more",
        where="protocol.hash_tree:check_proof",
        old="level != root or left or",
        new="level != root or",
        tests=(TREE,),
    ),
    Mutation(
        name="an audit that is cancelled before its turn ends the connections of another one",
        rule="connections to contributors end with the audit that has its turn",
        where="node.exchange.auditing:Auditor.audit",
        old="""            async with self._turn:
                self.num_audited += 1
                try:
                    return await self._audit(asked)
                finally:  # an audit that ends before its turn leaves the connections of the one that has it
                    for member in asked.contributors:
                        self.dialer.disconnect(member, Purpose.AUDIT)
""",
        new="""            try:
                async with self._turn:
                    self.num_audited += 1
                    return await self._audit(asked)
            finally:
                for member in asked.contributors:
                    self.dialer.disconnect(member, Purpose.AUDIT)
""",
        tests=(
            f"{EXCHANGE}::test_an_audit_that_is_cancelled_before_its_turn_leaves_the_connections_of_the_one_under_way",
        ),
    ),
    Mutation(
        name="a donor leaves a site that asks for nothing for a while",
        rule="a contributor that dials its auditor is there when the audit has its turn",
        where="node.exchange.catchup.donations:Donations._one",
        old="return len(self._dialled) < MAX_SITES",
        new="return False",
        tests=(f"{DONATIONS}::test_a_donor_stays_with_a_site_that_asks_late_and_leaves_one_that_wants_nothing_more",),
    ),
    Mutation(
        name="sites that ask a donor for nothing have all its places",
        rule="a donor gives up a site that asks for nothing, where others may want the place",
        where="node.exchange.catchup.donations:Donations._one",
        old="return len(self._dialled) < MAX_SITES",
        new="return True",
        tests=(f"{DONATIONS}::test_a_site_that_asks_for_nothing_keeps_nobody_else_out",),
    ),
)
