"""What people see of a run: values of scripts, curves, the page."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CURVES = "tests/unit/coordinator/test_curves.py"
AT_NODE = "tests/unit/local/test_logged_values.py"
OF_SCRIPT = "tests/unit/worker/test_logged_values.py"

MUTATIONS = (
    Mutation(
        name="one site's names take the room of all",
        rule="a site has a bounded number of curves",
        where="coordinator.core.curves:Curves._has_room",
        old="< 2 * MAX_NAMES",
        new="< MAX_CURVES",
        tests=(f"{CURVES}::test_one_site_cannot_take_the_room_of_all",),
    ),
    Mutation(
        name="sites' curves without bound",
        rule="a run has a bounded number of curves",
        where="coordinator.core.curves:Curves._has_room",
        old="if len(self._curves) >= MAX_CURVES:",
        new="if False:",
        tests=(f"{CURVES}::test_one_site_cannot_take_the_room_of_all",),
    ),
    Mutation(
        name="each look at the curves copies them",
        rule="what people look at costs the coordinator's event loop little",
        where="coordinator.curves_shown:_document",
        old="return {field.name: getattr(view, field.name) for field in fields(view)}",
        new="import dataclasses; return dataclasses.asdict(view)",
        tests=(f"{CURVES}::test_whoever_looks_at_curves_costs_no_copy_of_each_point",),
    ),
    Mutation(
        name="any text is a label",
        rule="names of logged values are of one alphabet, checked at the coordinator",
        where="coordinator.core.logging_values:heard",
        old='next((value.problem for value in message.values if value.problem), "")',
        new='""',
        tests=(f"{CURVES}::test_a_site_outside_the_run_has_no_curve_and_a_name_that_is_none_ends_its_stream",),
    ),
    Mutation(
        name="void steps stay on curves",
        rule="a rollback takes what was logged after its commit off the curves",
        where="coordinator.core.curves:Curves.go_back",
        old="curve.cut(run_step)",
        new="curve.cut(run_step + 10)",
        tests=(f"{CURVES}::test_a_site_that_went_back_says_the_later_steps_anew",),
    ),
    Mutation(
        name="a curve is kept with each value",
        rule="curves are kept now and then, not with each value",
        where="coordinator.core.curves:Curves.due",
        old="if is_over or now >= self._keep_at:",
        new="if True:",
        tests=(CURVES,),
    ),
    Mutation(
        name="values of the outer parameters are the site's own",
        rule="what is logged of the outer parameters is a curve of its own",
        where="node.worker.joined_site:JoinedSite.outer_parameters",
        old="with self._holding_outer():",
        new="if True:",
        tests=(OF_SCRIPT,),
    ),
    Mutation(
        name="a message for each value",
        rule="a script that logs at every step costs a message a second",
        where="node.worker.logged_values:LoggedValues.log",
        old="if len(self._waiting) == MAX_LOGGED:",
        new="if True:",
        tests=(OF_SCRIPT,),
    ),
    Mutation(
        name="an old coordinator hears what it does not know",
        rule="Logged goes to a coordinator whose Welcome says that it is read",
        where="node.daemon.logged_values:LoggedValues.beat",
        old="if not self.is_wanted:",
        new="if False:",
        tests=(AT_NODE,),
    ),
    Mutation(
        name="what a sync took at its first attempt alone",
        rule="the exchange of a sync, as people are shown it, is that of all its attempts",
        where="node.daemon.sync_phases:SitePhases._end_exchange",
        old="sync.exchange_s += now - sync.exchanging_since",
        new="sync.exchange_s = now - sync.exchanging_since",
        tests=("tests/unit/local/test_sync_phases.py",),
    ),
    Mutation(
        name="a site says what syncs took that nobody opened",
        rule="of phases the coordinator keeps those of few syncs and sites, whatever these say",
        where="coordinator.core.sync.phases_said:PhasesSaid.note",
        old="if not last_sync - KEPT_SYNCS < said.sync <= last_sync:",
        new="if said.sync <= last_sync - KEPT_SYNCS:",
        tests=("tests/unit/coordinator/test_phases_said.py",),
    ),
    Mutation(
        name="one site's word is the run's phases",
        rule="what a sync took is shown as the median site has it",
        where="coordinator.core.sync.phases_said:PhasesSaid.medians",
        old="median(found[place] for found in of_sites.values())",
        new="max(found[place] for found in of_sites.values())",
        tests=("tests/unit/coordinator/test_phases_said.py",),
    ),
    Mutation(
        name="a restart of the coordinator ends every look",
        rule="whoever watches a run goes on watching when its coordinator is started again",
        where="src.atoll.cli.looks:looks",
        old="except (HostError, PeerError) as error:",
        new="except ZeroDivisionError as error:",
        tests=("tests/unit/cli/test_seeing.py",),
    ),
    Mutation(
        name="the built-in trainer measures the site's own parameters",
        rule="a held-out loss is of the outer parameters",
        where="node.worker.held_out:HeldOut.evaluate",
        old='with site.busy("evaluation"), site.outer_parameters():',
        new='with site.busy("evaluation"):',
        tests=("tests/unit/worker/test_held_out.py",),
    ),
    Mutation(
        name="the end of a run is not measured",
        rule="the built-in trainer evaluates at the run's end, too",
        where="node.worker.held_out:HeldOut.is_due",
        old="number != self._number or not step.running",
        new="number != self._number",
        tests=("tests/unit/worker/test_held_out.py",),
    ),
)
