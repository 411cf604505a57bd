"""What hosts of a site keep for audits."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

KEPT = "tests/unit/local/test_kept_by_hosts.py"
AUDITS = "tests/unit/exchange/test_audits.py"
TREE = "tests/unit/protocol/test_hash_tree.py"

MUTATIONS = (
    Mutation(
        name="a proof of a damaged tree is given",
        rule="a site gives no proof that does not lead to its root",
        where="node.dataplane.kept_contributions:Kept.proof",
        old="check_proof(self.root, len(self.tree.chunks), place, chunk, hash, proof)",
        new="pass",
        tests=(
            "tests/unit/exchange/test_audits.py::"
            "test_a_bit_that_flips_in_the_tree_of_what_is_kept_makes_no_wrong_proof",
        ),
    ),
    Mutation(
        name="a knot over what a host keeps is over a chunk of another host",
        rule="the knots of a host are over what it keeps, and nothing else",
        where="protocol.hash_tree:knots_over",
        old="if first % 2:",
        new="if False:",
        tests=(f"{TREE}::test_hosts_that_hash_a_part_each_make_the_root_of_all_and_proofs_of_their_own",),
    ),
    Mutation(
        name="a host takes another hash of what it keeps than its own",
        rule="what a host proves is what it keeps",
        where="protocol.hash_tree:HashTree.complete",
        old="if self._levels[level][place] not in (None, knot):",
        new="if False:",
        tests=(f"{TREE}::test_hashes_of_other_hosts_that_cannot_be_are_refused",),
    ),
    Mutation(
        name="what is encoded late takes the place of a later snapshot's",
        rule="what auditors are given is what the site has said",
        where="node.dataplane.kept_contributions:KeptContributions._replaced",
        old="if before is not None and before.number > kept.number:",
        new="if False:",
        tests=(f"{AUDITS}::test_what_is_encoded_of_a_snapshot_that_was_given_up_takes_the_place_of_no_later_one",),
    ),
    Mutation(
        name="what a host keeps is given without a proof",
        rule="nobody is given a contribution before the root over it is known",
        where="node.dataplane.kept_contributions:KeptContributions.of",
        old="return kept if kept is not None and kept.root else None",
        new="return kept",
        tests=(f"{KEPT}::test_what_a_host_keeps_is_shown_to_nobody_before_what_the_others_keep_is_known",),
    ),
    Mutation(
        name="a host completes what it keeps with hashes of before",
        rule="what was kept under another number does not count",
        where="node.daemon.hosts.endpoint:Endpoint._complete",
        old="if kept is not None and number == job.number:",
        new="if kept is not None:",
        tests=(f"{KEPT}::test_what_a_host_keeps_is_shown_to_nobody_before_what_the_others_keep_is_known",),
    ),
    Mutation(
        name="a root is over what some hosts keep",
        rule="a site is ready when each of its hosts keeps what it is to contribute",
        where="node.daemon.hosts.replicas:Replicas.keep",
        old="            if of is None or of.problem:\n",
        new="            if of is not None and of.problem:\n",
        tests=(f"{KEPT}::test_a_root_needs_every_host_and_what_each_says_under_its_number",),
    ),
    Mutation(
        name="a site makes a root without a host that is not here",
        rule="a site is ready when each of its hosts keeps what it is to contribute",
        where="node.daemon.hosts.replicas:Replicas.keep",
        old="if missing := self.attached.missing:",
        new="if missing := ():",
        tests=(f"{KEPT}::test_a_root_needs_every_host_and_what_each_says_under_its_number",),
    ),
    Mutation(
        name="a host begins an exchange without proofs",
        rule="what a host contributes is what it keeps",
        where="node.daemon.hosts.host_exchanges:HostExchanges.begin",
        old="if begun.tokens and data.kept is None:",
        new="if False:",
        tests=(f"{KEPT}::test_a_host_begins_no_exchange_without_what_it_is_to_prove",),
    ),
    Mutation(
        name="host 0 gives what it keeps itself alone",
        rule="an auditor has what any host of a site contributed",
        where="node.exchange.catchup.donor_server:DonorServer._contributions",
        old="chunks and (host := self.elsewhere(chunks[0])) is not None:",
        new="chunks and (host := None) is not None:",
        tests=(f"{KEPT}::test_both_hosts_prove_what_they_keep_by_one_root_and_host_0_gives_what_either_has",),
    ),
    Mutation(
        name="the root of a snapshot that was given up is that of the next one",
        rule="what was encoded of a snapshot that was given up says nothing",
        where="node.daemon.disk_jobs:DiskJobs.keep_contributions.is_wanted",
        old="return now.kept_for == job.sync and (now.generation, now.step, now.seq) == of",
        new="return True",
        tests=(f"{KEPT}::test_of_a_snapshot_that_is_given_up_while_it_is_encoded_nothing_is_said",),
    ),
    Mutation(
        name="a site gives what it contributed as what its start before did",
        rule="what a start of a site contributed is that start's alone",
        where="node.exchange.catchup.donor_server:DonorServer._contributions",
        old="if request.of_incarnation != start:",
        new="if False:",
        tests=(
            f"{KEPT}::test_nobody_is_given_what_this_start_contributed_as_what_another_one_did",
            "tests/simulation/test_audits.py::"
            "test_a_site_that_comes_back_within_a_sync_is_not_judged_by_the_root_of_its_start_before",
        ),
    ),
    Mutation(
        name="an auditor that names no start is given what there is",
        rule="what a start of a site contributed is that start's alone",
        where="node.exchange.catchup.donor_server:DonorServer._contributions",
        old="if not request.of_incarnation:",
        new="if False:",
        tests=(f"{KEPT}::test_nobody_is_given_what_this_start_contributed_as_what_another_one_did",),
    ),
    Mutation(
        name="an auditor does not say which start it asks for",
        rule="what a start of a site contributed is that start's alone",
        where="node.exchange.catchup.donor_client:DonorClient.contribution",
        old="of_incarnation=self.donor.incarnation, ",
        new="",
        tests=(f"{KEPT}::test_nobody_is_given_what_this_start_contributed_as_what_another_one_did",),
    ),
    Mutation(
        name="all that host 0 passes on is counted as one site's",
        rule="places at a donor are shared among the sites that ask",
        where="node.exchange.catchup.donor_server:DonorServer._contributions",
        old="if request.for_site_id and site_id == self.identity().site_id:",
        new="if False:",
        tests=(f"{KEPT}::test_a_host_counts_what_host_0_passes_on_for_the_site_that_has_asked",),
    ),
    Mutation(
        name="any site is counted as another one",
        rule="places at a donor are shared among the sites that ask",
        where="node.exchange.catchup.donor_server:DonorServer._contributions",
        old="if request.for_site_id and site_id == self.identity().site_id:",
        new="if request.for_site_id:",
        tests=(f"{KEPT}::test_a_host_counts_what_host_0_passes_on_for_the_site_that_has_asked",),
    ),
    Mutation(
        name="hashes of one host are taken for those of the next",
        rule="a host whose hashes cannot be is named",
        where="node.daemon.hosts.replicas:Keeping.put_together",
        old="if (num := len(knots_over(len(tree.chunks), part))) != len(cover):",
        new="if (num := 0):",
        tests=(f"{KEPT}::test_a_root_needs_every_host_and_what_each_says_under_its_number",),
    ),
    Mutation(
        name="connections to hosts of the site stay after an audit",
        rule="a connection ends when it is needed no more",
        where="node.daemon.hosts.kept_elsewhere:KeptElsewhere._over",
        old="            self.hub.dialer.disconnect(donor, Purpose.AUDIT)\n",
        new="",
        tests=("tests/unit/local/test_kept_by_hosts.py::test_the_connection_to_a_host_ends_with_the_last_request",),
    ),
    Mutation(
        name="connections to contributors stay after an audit",
        rule="a connection ends when it is needed no more",
        where="node.exchange.auditing:Auditor.audit",
        old="self.dialer.disconnect(member, Purpose.AUDIT)",
        new="pass",
        tests=(f"{AUDITS}::test_connections_to_contributors_end_with_the_audit",),
    ),
    Mutation(
        name="a site audits without what its other hosts keep",
        rule="an auditor has what any host of a site contributed",
        where="node.exchange.auditing:Auditor._given.given",
        old="client = self.elsewhere(asked.chunk) if self._is_own(member) else self._client(asked, member)",
        new="client = None if self._is_own(member) else self._client(asked, member)",
        tests=(f"{KEPT}::test_a_site_audits_with_what_its_other_host_keeps",),
    ),
)
