"""What a run is seen by across sites, and what `atoll doctor` may ask for."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

IDS = "tests/unit/protocol/test_traces.py"
OF_SITES = "tests/unit/local/test_site_traces.py"
OF_COORDINATOR = "tests/unit/coordinator/test_tracing.py"
MEASURING = "tests/fuzz/test_measuring.py"

SCRAPED = "tests/unit/cli/test_scrape.py"
PAGES = "tests/unit/coordinator/test_status_page.py"

MUTATIONS = (
    Mutation(
        name="labels that a node makes up are series",
        rule="a member makes no series but those of a node",
        where="src.atoll.cli.scrape",
        old="action: labelkeep",
        new="action: replace",
        tests=(f"{SCRAPED}::test_of_a_node_no_label_is_kept",),
    ),
    Mutation(
        name="names that a node makes up are series",
        rule="a member makes no series but those of a node",
        where="src.atoll.cli.scrape:configuration",
        old='of_nodes = "|".join((*own, ',
        new='of_nodes = "|".join((*own, "atoll_node_.+", ',
        tests=(f"{SCRAPED}::test_of_a_node_the_metrics_that_nodes_have_are_kept_and_no_others",),
    ),
    Mutation(
        name="series of a site go by the address that it says",
        rule="a member makes no series but those of a node",
        where="coordinator.web:nodes_to_scrape",
        old=', "instance": site["name"]',
        new="",
        tests=(
            "tests/unit/coordinator/test_metrics.py::test_prometheus_is_told_where_the_nodes_are_that_can_be_scraped",
        ),
    ),
    Mutation(
        name="who leads is ready",
        rule="a coordinator is ready with a quorum, and with a store that takes decisions",
        where="coordinator.web:status_pages.answer",
        old='if found else plain_text(200, "ok: it leads")',
        new='if False else plain_text(200, "ok: it leads")',
        tests=(f"{PAGES}::test_a_leader_that_cannot_do_its_work_is_not_ready_and_lives",),
    ),
    Mutation(
        name="a page at every address has no name on its own machine",
        rule="whoever is at the coordinator's machine comes to its page by localhost",
        where="coordinator.main:names_of_page",
        old="return sorted(names | LOOPBACK_NAMES)  #",
        new="return sorted(names)  #",
        tests=(
            "tests/unit/cli/test_deployments.py"
            "::test_the_page_of_compose_is_where_it_says_and_prometheus_comes_by_a_name_of_it",
        ),
    ),
    Mutation(
        name="a unit of root's has all of root's power",
        rule="what atoll installs leaves open what a node and its script need",
        where="src.atoll.cli.unit:text",
        old='OF_SYSTEM if is_system else ""',
        new='""',
        tests=("tests/unit/cli/test_unit.py",),
    ),
    Mutation(
        name="root is not told that a script runs as root",
        rule="a script that runs as root is said",
        where="src.atoll.cli.unit:warnings",
        old="if os.geteuid() == 0 else []",
        new="if False else []",
        tests=("tests/unit/cli/test_unit.py::test_root_is_told_that_the_node_and_its_script_are_roots",),
    ),
    Mutation(
        name="each site has a trace of its own",
        rule="all spans of a sync are in one trace",
        where="protocol.traces:of_site",
        old="of_sync(run_id, sync).trace_id",
        new="of_sync(run_id, sync + site_id).trace_id",
        tests=(IDS,),
    ),
    Mutation(
        name="calls to peers carry no trace",
        rule="a stream of an exchange carries the span that it is of",
        where="node.exchange.peers.rpc:open_stream",
        old="metadata=traces.metadata()",
        new="metadata=None",
        tests=(IDS,),
    ),
    Mutation(
        name="a span has the text of an error",
        rule="no text of errors or tensors is in a span",
        where="node.daemon.tracing:SiteTraces.heard",
        old="""            case e.ExchangeBroken(plan=plan):
                self._end(plan.sync, "exchange", now, "broken")""",
        new="""            case e.ExchangeBroken(plan=plan, error=error):
                self._end(plan.sync, "exchange", now, str(error))""",
        tests=(OF_SITES,),
    ),
    Mutation(
        name="syncs that end without a word are kept for ever",
        rule="a tracer's memory is bounded",
        where="node.daemon.tracing:SiteTraces._at",
        old="and len(self._open) >= MOST_SYNCS:",
        new="and False:",
        tests=(OF_SITES,),
    ),
    Mutation(
        name="an attempt that fails is the beginning of the next one",
        rule="each plan has a span",
        where="coordinator.tracing:SyncTraces.kept",
        old="""                    if sync.attempt:
                        self._attempt(plan.sync, sync, now, "another attempt")
                    else:""",
        new="""                    if not sync.attempt:""",
        tests=(OF_COORDINATOR,),
    ),
    Mutation(
        name="spans that a collector does not take are not counted",
        rule="what is lost of traces is a metric",
        where="protocol.trace_export:Exporter._lost",
        old="            self.num_lost += num_spans\n",
        new="",
        tests=(IDS,),
    ),
    Mutation(
        name="each span that is lost is said",
        rule="a collector that takes nothing is said once",
        where="protocol.trace_export:Exporter._lost",
        old="        if is_new:\n",
        new="        if True:\n",
        tests=(IDS,),
    ),
    Mutation(
        name="the links of several sites are measured at once",
        rule="one link is measured at a time",
        where="protocol.measuring:Measures._let_in",
        old="        if self._is_busy:",
        new="        if False:",
        tests=(MEASURING,),
    ),
    Mutation(
        name="whoever measures a link may send without end",
        rule="a call that measures has a bound of bytes each way",
        where="protocol.measuring:Measures._serve",
        old="max(received, whole - BESIDE_BYTES, given) > MAX_BYTES",
        new="given > MAX_BYTES",
        tests=(MEASURING,),
    ),
    Mutation(
        name="whoever measures a link may take without end",
        rule="a call that measures has a bound of bytes each way",
        where="protocol.measuring:Measures._serve",
        old="max(received, whole - BESIDE_BYTES, given) > MAX_BYTES",
        new="max(received, whole - BESIDE_BYTES) > MAX_BYTES",
        tests=(MEASURING,),
    ),
    Mutation(
        name="links are measured for strangers",
        rule="links are measured for sites with certificates alone",
        where="protocol.measuring:Measures._let_in",
        old="            raise RefusedError(",
        new="            return\n            raise RefusedError(",
        tests=(MEASURING,),
    ),
    Mutation(
        name="a site has others dialled again and again",
        rule="who wants to be dialled is dialled now and then",
        where="node.exchange.service:PeerService.dial_me",
        old="if not self._dials.take(caller.subject.name, asyncio.get_running_loop().time()):",
        new="if False:",
        tests=(MEASURING,),
    ),
    Mutation(
        name="who wants to be dialled may be anybody",
        rule="who is dialled must answer as the caller",
        where="node.exchange.service:PeerService.dial_me",
        old="request.address[:MAX_ADDRESS], caller.subject.name",
        new='request.address[:MAX_ADDRESS], ""',
        tests=(MEASURING,),
    ),
    Mutation(
        name="one slow link fails a machine",
        rule="a machine is at fault if all its links are too slow",
        where="node.daemon.doctor:all_links",
        old="fastest = max(",
        new="fastest = min(",
        tests=("tests/unit/local/test_doctor.py",),
    ),
)
