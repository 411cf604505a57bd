"""What a second look at operating a run found: bans and clocks, audits and rollbacks, faults, pages."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

BANS = "tests/unit/coordinator/test_bans.py"
GONE_BACK = "tests/unit/coordinator/test_audits_gone_back.py"
AUDITS = "tests/unit/exchange/test_audits.py"
COMPUTING = "tests/unit/coordinator/test_computing.py"

MUTATIONS = (
    Mutation(
        name="a clock that was ahead lifts a ban for good",
        rule="6: a ban with an end holds again if the clock is set back within a day",
        where="coordinator.core.sites.bans:expire",
        old="            _ban(run, replace(record, is_over=False))\n",
        new="",
        tests=(f"{BANS}::test_a_ban_that_ended_by_a_clock_that_was_ahead_holds_again_when_that_is_set_right",),
    ),
    Mutation(
        name="a ban that is over is kept for ever",
        rule="what is kept is bounded",
        where="coordinator.core.sites.bans:expire",
        old="            run.forget_ban(record.name)\n",
        new="            pass\n",
        tests=(f"{BANS}::test_a_ban_that_ended_by_a_clock_that_was_ahead_holds_again_when_that_is_set_right",),
    ),
    Mutation(
        name="audits of void commits stay open",
        rule="47: a rollback ends audits of what is void",
        where="coordinator.core.log.rollback:go_back",
        old="    judging.gone_back(run)",
        new="    pass",
        tests=(GONE_BACK,),
    ),
    Mutation(
        name="who could not be asked has denied",
        rule="47: who could not be asked any more has not denied",
        where="coordinator.core.auditing.sentencing:not_heard",
        old="Cause.MEMORY",
        new="Cause.AUDIT",
        tests=(GONE_BACK,),
    ),
    Mutation(
        name="nothing is held against who lies under a number that was void",
        rule="47: what is found of one commit is one offence, and of another one another",
        where="coordinator.core.sites.conduct:Conduct.went_back",
        old="min(self._judged_to, commit)",
        new="self._judged_to",
        tests=(GONE_BACK,),
    ),
    Mutation(
        name="an exchange process alone is what the site made",
        rule="47: the root of a reducer is over all payloads that its site made",
        where="node.exchange.sync.reduction:share_of",
        old="for chunk in data.all_chunks if",
        new="for chunk in data.chunks if",
        tests=(
            f"{AUDITS}::test_an_exchange_process_proves_what_its_node_kept_and_all_of_a_sites_chunks_are_under_its_root",
        ),
    ),
    Mutation(
        name="a fault beside the event loop is lost",
        rule="a fault ends the coordinator, which else would wait for ever",
        where="coordinator.computing:Computing._ended",
        old="            self._failed()\n",
        new="",
        tests=(COMPUTING,),
    ),
    Mutation(
        name="a manifest that nobody foresaw",
        rule="whatever a site offers, it is refused for it and others may offer",
        where="coordinator.core.sites.manifests:read",
        old="except Exception as error",
        new="except (InvalidMessage, ConfigError) as error",
        tests=(COMPUTING,),
    ),
    Mutation(
        name="handshakes without a pace",
        rule="strangers cost the coordinator little",
        where="protocol.pages:Pages._serve",
        old="not self._may_shake_hands(writer)",
        new="False",
        tests=("tests/unit/protocol/test_pages.py::test_handshakes_have_a_pace_by_address_and_in_all",),
    ),
    Mutation(
        name="a site says products before all of its parts have",
        rule="influences are found of all contributions to all chunks",
        where="node.daemon.shared_products:SharedProducts._look",
        old="awaited.said.keys() >= {OWN, *awaited.parts}",
        new="awaited.said",
        tests=("tests/unit/local/test_shared_products.py",),
    ),
)
