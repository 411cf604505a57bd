"""What a second look at operating a run found: bans and clocks, audits and rollbacks, faults, pages."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

BANS = "tests/unit/coordinator/test_bans.py"
GONE_BACK = "tests/unit/coordinator/test_audits_gone_back.py"
AUDITS = "tests/unit/exchange/test_audits.py"
COMPUTING = "tests/unit/coordinator/test_computing.py"
OF_HOSTS = "tests/unit/local/test_exchanges_of_hosts.py"
RESTORED = "tests/unit/coordinator/test_restored.py"
CURVES = "tests/unit/coordinator/test_curves.py"
PIECES = "tests/unit/worker/test_worker_pieces.py"

MUTATIONS = (
    Mutation(
        name="a site says the inner products of one process",
        rule="47: what a site says of contributions is of all that it reduces",
        where="node.daemon.exchanges:Exchanges.multiplied",
        old="lambda of_host: self._of_hosts.summed(plan, of_host, made)",
        new="made",
        tests=(f"{OF_HOSTS}::test_inner_products_that_a_site_says_are_those_of_all_its_processes_and_hosts",),
    ),
    Mutation(
        name="a start removes the copies that a person made",
        rule="nothing is lost that a person made",
        where="coordinator.backup:remove_left_over",
        old=" and re.fullmatch(_LEFT_OVER, path.name.removeprefix(begins))",
        new="",
        tests=(RESTORED,),
    ),
    Mutation(
        name="what is held against a site outlives a person's pardon",
        rule="6: a person may forget what is held against a site whose ban is over",
        where="coordinator.core.sites.bans:lift",
        old="    elif name in run.bans_over:\n        run.forget_ban(name)\n",
        new="",
        tests=(f"{BANS}::test_what_is_held_against_a_site_is_forgotten_by_a_person_also_when_its_ban_is_over",),
    ),
    Mutation(
        name="a curve of two ranks stops growing",
        rule="of one step the last value counts",
        where="coordinator.core.curves:Curve.add",
        old="            self.newest, self.is_kept = point, False\n            return\n",
        new="",
        tests=(CURVES,),
    ),
    Mutation(
        name="what is there is kept beside itself",
        rule="no memory that nobody counts",
        where="node.worker.pieces:SharedTensors._swap_into",
        old="None if copies.are_equal(publish, local) else local",
        new="local",
        tests=(PIECES,),
    ),
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
        old="    judging.gone_back(run, last)",
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
        name="one memory that flips bits is several faults once the commits are void",
        rule="47: what was wrong with a site then may have spoiled several chunks",
        where="coordinator.core.auditing.judging:gone_back",
        old="sentencing.not_heard(run, audit, last)",
        new="sentencing.not_heard(run, audit, run.log.last)",
        tests=(GONE_BACK,),
    ),
    Mutation(
        name="what was found before a ban was lifted is held against the site",
        rule="a person who lifts a ban forgives what was found by then",
        where="coordinator.core.sites.conduct:Conduct.pardoned",
        old="judged_to=newest, ",
        new="",
        tests=(
            "tests/unit/coordinator/test_audits.py::test_a_ban_that_is_lifted_is_not_followed_by_what_was_found_before",
        ),
    ),
    Mutation(
        name="whoever waits at the door as it is banned is let in",
        rule="a banned site is not in the run",
        where="coordinator.core.sites.admission:offer",
        old="if (banned := bans.refusal(run, site.name, site.key_digest)) is not None:",
        new="if banned := None:",
        tests=("tests/unit/coordinator/test_audits.py",),
    ),
    Mutation(
        name="a start of the coordinator brings back curves of void commits",
        rule="what is void is nowhere",
        where="coordinator.core.log.rollback:go_back",
        old="        run.persist(curve)\n",
        new="        pass\n",
        tests=("tests/unit/coordinator/test_curves.py",),
    ),
    Mutation(
        name="a Ready that is said again after a restart is another one by the last digit of a rate",
        rule="rates of one script on two machines are the same",
        where="coordinator.core.sync.driver:_is_same",
        old="same_rates(known.rates, said.rates)",
        new="known.rates == said.rates",
        tests=("tests/unit/coordinator/test_phases.py",),
    ),
    Mutation(
        name="an error that a start before has not advanced is lost without a word",
        rule="error feedback that is lost is counted and said",
        where="node.core.errors:welcomed",
        old="(at != 0 or wanted[f])",
        new="at != 0",
        tests=("tests/unit/node_core/test_errors.py",),
    ),
    Mutation(
        name="each error of an average for which there is no room is said",
        rule="what fails for each chunk is said once",
        where="node.exchange.sync.average_errors:AverageErrors.keep",
        old="if attempt not in self._said_of:",
        new="if True:",
        tests=("tests/unit/exchange/test_average_errors.py",),
    ),
    Mutation(
        name="a run that is resumed has other rates than the one before without slots",
        rule="a run that is resumed has the outer optimizer of the one before",
        where="src.atoll.cli.coordinator:as_before",
        old="    return resolved(settings, before.outer)",
        new='    return resolved(settings, before.outer if saved.slots else OuterSettings(optimizer="sgd"))',
        tests=("tests/unit/cli/test_resume.py",),
    ),
    Mutation(
        name="a saved model says the settings of the run as it began",
        rule="a run that is resumed has the outer optimizer of the one before",
        where="node.daemon.models:Models._save",
        old="settings_with(core.settings, core.site.changed_json)",
        new="core.settings",
        tests=("tests/unit/local/test_node_failures.py",),
    ),
    Mutation(
        name="nothing is held against who lies under a number that was void",
        rule="47: what is found of one commit is one offence, and of another one another",
        where="coordinator.core.sites.conduct:Conduct.went_back",
        old="min(self.judged_to, commit)",
        new="self.judged_to",
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
        old="self._handshakes.begin(source, now) is None",
        new="False",
        tests=(
            "tests/unit/protocol/test_pages.py::"
            "test_handshakes_have_a_pace_by_address_and_in_all_and_a_token_that_is_good_gives_more",
        ),
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
