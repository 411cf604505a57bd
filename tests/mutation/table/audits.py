"""Reducers that are audited."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CORE = "tests/unit/coordinator/test_audits.py"
SITE = "tests/unit/node_core/test_audits.py"
EXCHANGE = "tests/unit/exchange/test_audits.py"
TREE = "tests/unit/protocol/test_hash_tree.py"

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
        name="an auditor that lies goes free",
        rule="an auditor that lies is judged as a reducer is",
        where="coordinator.core.auditing.judging:_right",
        old="        _judge(run, audit, accuser_id, why)\n",
        new="        pass\n",
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
        where="coordinator.core.sites.conduct:Conduct.offend",
        old="if commit <= self._judged_to:",
        new="if False:",
        tests=(f"{CORE}::test_what_was_wrong_in_several_chunks_of_a_commit_is_one_offence",),
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
)
