"""What a third look at operating a run found: handshakes, hosts of two releases, a relay, audits and going back."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

HANDSHAKES = "tests/unit/protocol/test_handshakes.py"
PAGES = "tests/unit/protocol/test_pages.py"
AUDITS = "tests/unit/coordinator/test_audits.py"
GONE_BACK = "tests/unit/coordinator/test_audits_gone_back.py"
DEPOSITS = "tests/unit/local/test_deposits.py"
HOSTS = "tests/unit/local/test_hosts_of_a_site.py"
ADDRESSES = "tests/unit/relay/test_addresses.py"

MUTATIONS = (
    Mutation(
        name="a hello asks for arithmetic that takes a tenth of a second",
        rule="strangers cost the coordinator little",
        where="protocol.trust.server_tls:new_context",
        old="    context.set_ecdh_curve(GROUP)\n",
        new="",
        tests=("tests/unit/trust/test_server_tls.py",),
    ),
    Mutation(
        name="strangers use up the handshakes of those who were let in",
        rule="no stranger keeps a viewer out",
        where="protocol.handshakes:Crowds.of",
        old="source in self._known or",
        new="",
        tests=(HANDSHAKES,),
    ),
    Mutation(
        name="few handshakes are as good as many",
        rule="an address that begins many handshakes keeps nobody else out",
        where="protocol.handshakes:Crowds.of",
        old="Crowd.FEW if self._few.take(source, now) else Crowd.MANY",
        new="Crowd.MANY",
        tests=(HANDSHAKES,),
    ),
    Mutation(
        name="whoever comes first before the coordinator's door has its handshake first",
        rule="an address that begins many handshakes keeps nobody else out",
        where="coordinator.door_counts:Counts.__init__",
        old="sorted(Crowd, reverse=True)",
        new="sorted(Crowd)",
        tests=("tests/unit/coordinator/test_door_counts.py",),
    ),
    Mutation(
        name="who shows no token is let in",
        rule="no stranger keeps a viewer out",
        where="protocol.pages:Pages._answered",
        old="            return refusal\n        self._handshakes.let_in(source)\n",
        new="            self._handshakes.let_in(source)\n            return refusal\n",
        tests=(PAGES,),
    ),
    Mutation(
        name="a reducer that is silent as the run goes back loses nothing",
        rule="who gives its error to nobody averages nothing for a while",
        where="coordinator.core.auditing.withholding:not_heard",
        old="    if was_silent:\n",
        new="    if False:\n",
        tests=(GONE_BACK,),
    ),
    Mutation(
        name="people are told to go back before who is accused is asked",
        rule="who is accused is asked before it is judged",
        where="coordinator.core.auditing.sentencing:accuse",
        old="    _ask_next(run, audit)\n",
        new="    run.report(logging.ERROR, advice)\n    _ask_next(run, audit)\n",
        tests=(AUDITS,),
    ),
    Mutation(
        name="a file of a home that has less now stays as it was",
        rule="a home has what --max-disk-gb says",
        where="node.daemon.deposit_box:DepositBox._shrink",
        old='        self._db.execute("VACUUM")\n',
        new="",
        tests=(DEPOSITS,),
    ),
    Mutation(
        name="hosts of a site are of two releases",
        rule="hosts of a site run one release, and refuse another by name",
        where="node.daemon.hosts.link:check_release",
        old="if said.hosts_version == HOSTS_VERSION:",
        new="if True:",
        tests=(HOSTS,),
    ),
    Mutation(
        name="a relay leads on to a coordinator that is stopped",
        rule="of several coordinators a relay leads to the one that answers",
        where="node.relay.outgoing:connect_first.attempt",
        old="            if not await greeting.first_record(connection):\n",
        new="            if False:\n",
        tests=(ADDRESSES,),
    ),
    Mutation(
        name="a relay says a hello twice",
        rule="a relay changes nothing of what it carries",
        where="node.relay.server:RelayServer._lead_to_coordinator",
        old="        connection.recv(len(hello))  # it is said\n",
        new="",
        tests=(ADDRESSES,),
    ),
    Mutation(
        name="one address pushes all strangers out of a relay",
        rule="an address that opens many connections makes room itself",
        where="node.relay.server:RelayServer._accept",
        old="if source == most)",
        new="if source)",
        tests=("tests/unit/relay/test_server.py",),
    ),
    Mutation(
        name="a crowd before the coordinator takes the places of strangers",
        rule="who waits for a coordinator is no stranger",
        where="node.relay.server:RelayServer._greet",
        old="self._strangers.pop(task, None)  # in",
        new="pass  # in",
        tests=(ADDRESSES,),
    ),
    Mutation(
        name="handshakes with a relay have no pace",
        rule="strangers cost a relay little",
        where="node.relay.server:RelayServer._greet",
        old="(crowd := self._handshakes.begin(source, self._loop.time())) is None",
        new="not (crowd := self._handshakes.begin(source, self._loop.time()) or 1)",
        tests=("tests/unit/relay/test_server.py",),
    ),
    Mutation(
        name="a relay gives a banned site its handshakes back",
        rule="what a site that is banned begins is a stranger's",
        where="node.relay.server:RelayServer._speak",
        old="            if name in self._banned:\n",
        new="            is_welcome()\n            if name in self._banned:\n",
        tests=("tests/unit/relay/test_server.py::test_handshakes_of_a_site_that_is_banned_are_those_of_a_stranger",),
    ),
    Mutation(
        name="of a crowd at the door the oldest go first",
        rule="an address that has many handshakes under way waits for one that has none",
        where="coordinator.door_counts:Counts._in_turn",
        old="places[number] = num_of[source]",
        new="places[number] = 0",
        tests=("tests/unit/coordinator/test_door_counts.py",),
    ),
    Mutation(
        name="handshakes of sites with a relay count",
        rule="what ends with a certificate is given back",
        where="node.relay.server:RelayServer._greet.is_welcome",
        old="self._handshakes.give_back(source, crowd, self._loop.time())",
        new="pass",
        tests=("tests/unit/relay/test_server.py",),
    ),
    Mutation(
        name="a fault in reading a manifest leaves no trace",
        rule="what nobody foresaw can be mended",
        where="coordinator.computing:Computing._ended",
        old="found.fault is not None",
        new="False",
        tests=("tests/unit/coordinator/test_computing.py",),
    ),
)
