"""Averages by influence: found by inner products, kept, said, and waited for."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

COORDINATOR = "tests/unit/coordinator/test_influence.py"
NODE_CORE = "tests/unit/node_core/test_influence.py"
EXCHANGE = "tests/unit/exchange/test_influence.py"
OF_HUBS = (
    "tests/process/test_influence.py::test_reducers_say_the_products_of_all_chunks_and_average_with_what_is_said_then"
)

MUTATIONS = (
    Mutation(
        name="what is far away pulls as much as what is near",
        rule="an average by influence is the geometric median",
        where="coordinator.core.sync.geometric_median:shares",
        old="weight / math.sqrt(max(smallest, to - spread))",
        new="weight",
        tests=(COORDINATOR,),
    ),
    Mutation(
        name="who says more tokens has more voice",
        rule="nobody has more voice in influences than the median contributor",
        where="coordinator.core.sync.influence:voices",
        old="float(min(count, most))",
        new="float(count)",
        tests=(f"{COORDINATOR}::test_nobody_has_more_voice_than_the_median_contributor",),
    ),
    Mutation(
        name="products may be more than those of the norms",
        rule="inner products that no contributions have are refused",
        where="coordinator.core.sync.geometric_median:problem_of",
        old="if abs(of[i][j]) > (1 + ROUNDING)",
        new="if abs(of[i][j]) > (9 + ROUNDING)",
        tests=(f"{COORDINATOR}::test_what_no_two_contributions_have_is_no_word_on_them",),
    ),
    Mutation(
        name="influences are found without a reducer",
        rule="influences are of the products of all reducers of the attempt",
        where="coordinator.core.sync.influence:decide",
        old="if not is_awaited(run, attempt) or owing(attempt):",
        new="if not is_awaited(run, attempt) or len(owing(attempt)) > 1:",
        tests=(f"{COORDINATOR}::test_the_weights_are_said_once_all_reducers_have_spoken_and_the_commit_lists_them",),
    ),
    Mutation(
        name="influences are said and not kept",
        rule="the coordinator keeps a decision before it says it",
        where="coordinator.core.sync.driver:_influence",
        old="    run.persist(found)\n",
        new="",
        tests=(COORDINATOR,),
    ),
    Mutation(
        name="influences are found anew after a restart",
        rule="what was said of an attempt stands",
        where="coordinator.core.sync.syncs:Sync._resume",
        old="known[found.attempt].influence(found, now)",
        new="pass",
        tests=(f"{COORDINATOR}::test_a_coordinator_that_is_started_again_says_what_it_said",),
    ),
    Mutation(
        name="whoever waits for influences hangs",
        rule="before influences are told only reducers that have not spoken hold up the others",
        where="coordinator.core.sync.standstill:decide",
        old="    if influence.is_awaited(run, attempt):  # all others wait for these\n",
        new="    if False:\n",
        tests=(f"{COORDINATOR}::test_who_holds_up_the_others_is_evicted_and_whoever_waits_for_it_is_not",),
    ),
    Mutation(
        name="what held up influences counts against whoever averages",
        rule="the deadline of an attempt runs anew from when influences are told",
        where="coordinator.core.sync.attempts:Attempt.runs_since",
        old="return max(self.planned_at, self.averages_since)",
        new="return self.planned_at",
        tests=(f"{COORDINATOR}::test_the_time_to_average_runs_from_when_reducers_hear_what_contributions_count",),
    ),
    Mutation(
        name="influences that come late end the exchange",
        rule="the deadline of an attempt runs anew from when influences are told, on sites too",
        where="node.exchange.sync.exchange:Exchange.influence",
        old="self._begin_anew()",
        new="self._restart_clocks()",
        tests=("tests/unit/exchange/test_influence.py::test_whoever_hears_influences_after_the_deadline_has_it_anew",),
    ),
    Mutation(
        name="a commit lists no influences",
        rule="a commit lists what its contributions count",
        where="coordinator.core.sync.outcomes:commit",
        old="attempt.weights.tokens, attempt.influences)",
        new="attempt.weights.tokens)",
        tests=(f"{COORDINATOR}::test_the_weights_are_said_once_all_reducers_have_spoken_and_the_commit_lists_them",),
    ),
    Mutation(
        name="products are said once, whatever stream they went to",
        rule="what was said is said again on a new stream",
        where="node.core.lanes.exchanges:say_again",
        old="lane.exchange.products is not None and not lane.exchange.influences",
        new="False",
        tests=(NODE_CORE,),
    ),
    Mutation(
        name="influences change",
        rule="influences of an attempt never change",
        where="node.core.lanes.exchanges:influence",
        old="if exchange.influences or not exchange.is_under_way",
        new="if not exchange.is_under_way",
        tests=(f"{NODE_CORE}::test_influences_never_change_and_those_of_another_attempt_are_nothing",),
    ),
    Mutation(
        name="a commit may count contributions otherwise than was said",
        rule="a site refuses a commit of its attempt that lists other influences",
        where="node.core.lanes.own_word:wrong_in_commit",
        old="if exchange.influences and influences(commit) != exchange.influences:",
        new="if False:",
        tests=(f"{NODE_CORE}::test_a_commit_with_other_influences_than_were_said_ends_the_site",),
    ),
    Mutation(
        name="products are added as they come",
        rule="the same contributions give the same products in whatever order they come",
        where="node.exchange.sync.multiplication:Multiplication._multiply",
        old="self._ended.pop(next_one, None)",
        new="self._ended.pop(next(iter(self._ended), next_one), None)",
        tests=(EXCHANGE,),
    ),
    Mutation(
        name="a reducer is blamed for what the coordinator has not said",
        rule="before influences are told nobody is blamed for payloads",
        where="node.exchange.sync.upstream:Upstream.is_before_average",
        old="return self.all_sent and not self.reducer.influences.are_told",
        new="return False",
        tests=(EXCHANGE,),
    ),
    Mutation(
        name="a reducer averages before influences are told",
        rule="a reducer averages nothing before influences are told",
        where="node.exchange.sync.reducer:Reducer.reduce_ready",
        old="if self._is_started and self.influences.are_told and",
        new="if self._is_started and",
        tests=(OF_HUBS,),
    ),
    Mutation(
        name="buffers go by influence",
        rule="buffers are averaged by tokens",
        where="node.exchange.sync.reducer:Reducer._is_by_influence",
        old="return data.travels.of(data.layout.chunks[chunk].role).by_influence",
        new="return data.travels.trainable.by_influence",
        tests=(OF_HUBS,),
    ),
    Mutation(
        name="the digest of payloads is not over influences",
        rule="Done's digest covers influences",
        where="protocol.plans:payloads_digest",
        old="    digest.uints(influences(plan))",
        new="    digest.uints(())",
        tests=("tests/unit/protocol/test_plans.py",),
    ),
    Mutation(
        name="two sites have a median",
        rule="an average by influence has three contributors at least",
        where="protocol.settings",
        old="LEAST_MEDIAN_SITES = 3",
        new="LEAST_MEDIAN_SITES = 2",
        tests=("tests/unit/protocol/test_settings.py",),
    ),
)
