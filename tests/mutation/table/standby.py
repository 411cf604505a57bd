"""Two coordinators on one database: the lease, the term as its fence, and who waits for what."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

STORE = "tests/unit/coordinator/test_postgresql_store.py"
LEASE = "tests/unit/coordinator/test_lease.py"
AUTHORITY = "tests/unit/coordinator/test_authority.py"
SESSION = "tests/process/test_node_session.py"
STANDING = "tests/unit/trust/test_standing.py"
LEARNED = f"{STANDING}::test_who_stands_by_is_learned_kept_and_asked_when_the_first_one_is_gone"
SECOND = f"{STORE}::test_a_second_one_leads_when_the_lease_is_over_and_the_first_one_keeps_nothing_more"

MUTATIONS = (
    Mutation(
        name="a leader whose term is over keeps what it decides",
        rule="31: every transaction compares the term",
        where="coordinator.sql_store:SqlStore._total_at",
        old="if newest != term:",
        new="if newest > term + 1:",
        tests=(SECOND,),
    ),
    Mutation(
        name="a lease that runs is taken",
        rule="31: one coordinator leads",
        where="coordinator.lease:Claim.check",
        old="if not held.is_over and held.holder != self.holder:",
        new="if held.is_over and held.holder != self.holder:",
        tests=(SECOND,),
    ),
    Mutation(
        name="a lease that is over is renewed",
        rule="31: after its lease a leader does not go on, whoever has it",
        where="coordinator.postgresql_lease",
        old='"WHERE holder = ? AND until > clock_timestamp()"',
        new='"WHERE holder = ?"',
        tests=(SECOND,),
    ),
    Mutation(
        name="another one's lease is renewed",
        rule="31: one coordinator leads",
        where="coordinator.postgresql_lease",
        old="WHERE holder = ? AND until > clock_timestamp()",
        new="WHERE (holder = ? OR true) AND until > clock_timestamp()",
        tests=(SECOND,),
    ),
    Mutation(
        name="a transaction's begin is the clock of the lease",
        rule="31: a lease lasts from the moment in which it is taken or renewed, by the database's clock",
        where="coordinator.postgresql_lease",
        old='_LASTS = "clock_timestamp() + make_interval(secs => ?)"',
        new='_LASTS = "until + make_interval(secs => ?)"',
        tests=(f"{STORE}::test_a_renewal_counts_from_the_clock_of_the_database",),
    ),
    Mutation(
        name="a renewal counts from its answer",
        rule="31: a leader says nothing more when its lease may be over",
        where="coordinator.lease:Leading.keep",
        old="asked_at + LEASE_S)",
        new="self._loop.time() + LEASE_S + 1)",
        tests=(f"{LEASE}::test_a_leader_that_does_not_reach_the_database_ends_before_the_lease_does",),
    ),
    Mutation(
        name="a leader sleeps past the end of its lease",
        rule="31: a leader says nothing more when its lease may be over",
        where="coordinator.lease:Leading.keep",
        old="max(0.0, min(RENEW_EVERY_S, self.left_s))",
        new="RENEW_EVERY_S",
        tests=(f"{LEASE}::test_a_leader_that_does_not_reach_the_database_ends_before_the_lease_does",),
    ),
    Mutation(
        name="a renewal that hangs is waited for",
        rule="31: a leader says nothing more when its lease may be over",
        where="coordinator.lease:Leading.keep",
        old="timeout=self.left_s)",
        new="timeout=None)",
        tests=(f"{LEASE}::test_a_renewal_that_hangs_is_not_waited_for",),
    ),
    Mutation(
        name="whoever stands by does not wait",
        rule="31: one coordinator leads",
        where="coordinator.lease:Held.is_over",
        old="return self.left_s <= 0.0",
        new="return self.left_s <= 100.0",
        tests=(f"{LEASE}::test_whoever_stands_by_looks_until_the_lease_is_over_by_the_clock_of_the_database",),
    ),
    Mutation(
        name="a transaction of one that hangs is never ended",
        rule="31: a leader that is stopped in front of COMMIT holds up nobody",
        where="coordinator.postgresql",
        old='    "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_S}s",\n',
        new="",
        tests=(f"{STORE}::test_a_database_that_may_forget_is_refused",),
    ),
    Mutation(
        name="an old leader commits while the next one checks the rows",
        rule="31: a leader that goes on too late changes nothing, and a whole store is not taken for a damaged one",
        where="coordinator.postgresql_store:PostgresqlStore.begin",
        old='"SELECT id FROM head FOR UPDATE"',
        new='"SELECT id FROM head"',
        tests=(f"{STORE}::test_what_an_old_leader_commits_while_the_next_one_checks_the_rows_is_no_damage",),
    ),
    Mutation(
        name="a standby begins with the connection that it had at its start",
        rule="a standby is there when it is needed, whatever the database went through",
        where="coordinator.postgresql_store:PostgresqlStore.begin",
        old="""        self._db.close()  # it may have broken while this one stood by
        self._connect()
""",
        new="",
        tests=(f"{STORE}::test_one_that_stood_by_while_the_database_was_started_again_leads_when_it_is_needed",),
    ),
    Mutation(
        name="a database ends a start that reads a long log",
        rule="a coordinator starts however long its log is",
        where="coordinator.postgresql_store:PostgresqlStore.begin",
        old="self._may_take_long()",
        new="pass",
        tests=(f"{STORE}::test_a_log_may_take_longer_to_read_than_the_server_waits_for_a_transaction_else",),
    ),
    Mutation(
        name="the root of whoever leads is not compared",
        rule="a coordinator that sites would not know does not stand by",
        where="coordinator.postgresql_store:PostgresqlStore._follow",
        old="if found.stage is None:",
        new="if found.stage is not None:",
        tests=(f"{STORE}::test_another_root_than_the_runs_is_refused",),
    ),
    Mutation(
        name="a session stays with an address at which nobody listens",
        rule="sites find the coordinator that leads",
        where="node.daemon.session:Session.run",
        old="            self._tried += 1\n",
        new="",
        tests=(
            f"{SESSION}::test_where_several_may_serve_the_run_the_session_finds_the_one_that_does_and_learns_of_others",
        ),
    ),
    Mutation(
        name="certificates are renewed at the addresses of the invite alone",
        rule="sites find the coordinator that leads",
        where="protocol.trust.standing:Standing.addresses",
        old="(*self._given, *self._learned)",
        new="self._given",
        tests=(LEARNED,),
    ),
    Mutation(
        name="what was learned of other coordinators is gone at a restart",
        rule="a node that starts while only the other coordinator lives gets in",
        where="protocol.trust.enrolled:keep_learned",
        old='{"learned": list(coordinators)}',
        new='{"learned": []}',
        tests=(LEARNED,),
    ),
    Mutation(
        name="nobody hears that another coordinator stands by",
        rule="sites find the coordinator that leads",
        where="coordinator.rotation:rotation_of",
        old="coordinators(), tuple(",
        new="(), tuple(",
        tests=(LEARNED,),
    ),
    Mutation(
        name="an invite of an operator elsewhere has that operator's addresses alone",
        rule="sites find the coordinator that leads",
        where="coordinator.enrolment:Enrolment.invite",
        old="(*said, *shared)",
        new="said",
        tests=(LEARNED,),
    ),
    Mutation(
        name="the first lease counts from when a coordinator has begun",
        rule="31: a leader says nothing more when its lease may be over",
        where="coordinator.lease:Leading.start",
        old="        keeping = ",
        new="        self.takes()\n        keeping = ",
        tests=(
            f"{LEASE}::test_the_first_lease_counts_from_before_it_was_taken_however_long_a_coordinator_takes_to_begin",
        ),
    ),
    Mutation(
        name="a renewal that was asked for before the lease was taken anew shortens it",
        rule="a restore ends in a coordinator that leads",
        where="coordinator.lease:Leading.keep",
        old="max(self._until, asked_at + LEASE_S)",
        new="asked_at + LEASE_S",
        tests=(f"{LEASE}::test_a_renewal_that_waits_while_the_store_takes_the_lease_anew_is_waited_for",),
    ),
    Mutation(
        name="the next root is trusted before whoever stands by has it",
        rule="a step of a rotation cuts nobody off",
        where="coordinator.rotation:Rotation._lacking",
        old="if not lacking or asked.at_once:",
        new="if True:",
        tests=(f"{AUTHORITY}::test_whoever_stands_by_is_brought_the_next_root_before_all_trust_it",),
    ),
    Mutation(
        name="a step of a rotation is not kept in the store that is shared",
        rule="whoever leads next has the roots that the first one came to",
        where="coordinator.rotation:Rotation.ask",
        old="if self._leading is not None:",
        new="if False:",
        tests=(f"{AUTHORITY}::test_whoever_stands_by_is_brought_the_next_root_before_all_trust_it",),
    ),
    Mutation(
        name="whoever stands by takes no notice of a rotation",
        rule="whoever leads next has the roots that the first one came to",
        where="coordinator.lease:Leading.is_free",
        old="if held.stage is not None and await",
        new="if held.is_over and held.stage is not None and await",
        tests=(f"{LEASE}::test_whoever_stands_by_follows_the_roots_of_the_leader_and_does_not_lead_without_them",),
    ),
    Mutation(
        name="a stage of the roots is changed by one whose lease is over",
        rule="31: one coordinator leads",
        where="coordinator.postgresql_lease",
        old='_KEEP_STAGE = f"UPDATE lease SET stage = ? {_OF_THE_HOLDER}"',
        new='_KEEP_STAGE = "UPDATE lease SET stage = ? WHERE holder = ?"',
        tests=(f"{STORE}::test_whoever_leads_next_has_the_roots_that_the_first_one_came_to",),
    ),
    Mutation(
        name="a coordinator that is restored refuses whoever wants a certificate",
        rule="what it cannot do yet is tried again",
        where="coordinator.calls:all_put_off",
        old='"CoordinatorService"].methods',
        new='"CoordinatorService"].methods[:0]',
        tests=(f"{STANDING}::test_while_a_coordinator_is_restored_whoever_wants_a_certificate_or_news_tries_again",),
    ),
)
