"""Sites that a relay leads to."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

PAIRING = "tests/unit/relay/test_pairing.py"
SERVER = "tests/unit/relay/test_server.py"
SPLICE = "tests/unit/relay/test_splice.py"
DIALER = "tests/unit/exchange/test_dialer.py"
REFUSED = "tests/unit/coordinator/test_refused_messages.py"
TRUST = "tests/unit/trust/test_trust.py"

MUTATIONS = (
    Mutation(
        name="a ticket is never used up",
        rule="a ticket is for one use",
        where="node.relay.pairing:Pairing.come",
        old="del self._by_ticket[ticket]",
        new="pair.tickets.append(ticket)",
        tests=(f"{PAIRING}::test_a_pair_is_whole_when_both_have_come_each_with_its_own_ticket",),
    ),
    Mutation(
        name="a ticket is good for ever",
        rule="a ticket has a time limit",
        where="node.relay.pairing:Pairing.come",
        old="now >= pair.until",
        new="False",
        tests=(f"{PAIRING}::test_a_ticket_is_good_for_a_while",),
    ),
    Mutation(
        name="an older start of a site is called",
        rule="the newest start of a site is the one that hears of calls",
        where="node.relay.pairing:Pairing.attach",
        old="before.start > start",
        new="False",
        tests=(f"{PAIRING}::test_the_newest_connection_of_the_newest_start_is_the_one_that_hears",),
    ),
    Mutation(
        name="the end of a connection that was replaced detaches the site",
        rule="what a newer connection has taken over is its own",
        where="node.relay.pairing:Pairing.detach",
        old="self._controls.get(name) == control",
        new="name in self._controls",
        tests=(f"{PAIRING}::test_the_newest_connection_of_the_newest_start_is_the_one_that_hears",),
    ),
    Mutation(
        name="a site without a quota left may call",
        rule="nothing more is carried for a site at the end of its quota",
        where="node.relay.pairing:Pairing.call",
        old="if problem := self._quotas.refusal(caller, now):",
        new="if (problem := self._quotas.refusal(caller, now)) and False:",
        tests=(f"{PAIRING}::test_a_site_that_has_used_its_quota_is_refused_until_its_day_is_over",),
    ),
    Mutation(
        name="what is open goes on beyond the quota",
        rule="nothing more is carried for a site at the end of its quota",
        where="node.relay.server:RelayServer._moved",
        old="self._splices[other].abort()",
        new="pass",
        tests=(f"{SERVER}::test_at_the_end_of_its_quota_a_site_is_cut_off_and_told_and_others_are_served",),
    ),
    Mutation(
        name="what was called before the end of a quota is joined after it",
        rule="nothing more is carried for a site at the end of its quota",
        where="node.relay.server:RelayServer._come",
        old="if problem := self.quotas.refusal(pair.caller, self._loop.time()):",
        new="if (problem := self.quotas.refusal(pair.caller, self._loop.time())) and False:",
        tests=(f"{SERVER}::test_what_was_called_before_the_end_of_a_quota_is_not_joined_after_it",),
    ),
    Mutation(
        name="connections to the coordinator fill a relay",
        rule="what a relay carries for nobody it knows is bounded",
        where="node.relay.server:RelayServer._lead_to_coordinator",
        old="len(self.to_coordinator) + self._num_led >= MAX_TO_COORDINATOR",
        new="False",
        tests=(f"{SERVER}::test_connections_to_the_coordinator_are_bounded",),
    ),
    Mutation(
        name="whom a client expects is read from a part of its first record",
        rule="a relay waits for all of the record in which a client says whom it expects",
        where="node.relay.greeting:first_record",
        old="len(found) >= needed or len(found) < wanted",
        new="True",
        tests=(f"{SERVER}::test_who_expects_the_coordinator_is_led_to_it",),
    ),
    Mutation(
        name="a relay takes any certificate of the run for a site's",
        rule="a relay serves sites by what they show to each other, and nobody else",
        where="node.relay.greeting:site_of",
        old="if subject.run_id != run_id or subject.kind not in (Kind.SITE, Kind.HOST):",
        new="if False:",
        tests=(f"{SERVER}::test_who_is_no_site_of_the_run_gets_no_answer",),
    ),
    Mutation(
        name="a site takes another one for a relay",
        rule="who dials a relay expects a relay of the run",
        where="node.relay.greeting:encrypted",
        old="tls.towards(Kind.RELAY).expected",
        new='tls.towards(Kind.SITE, "b").expected',
        tests=(f"{SERVER}::test_a_site_that_expects_a_relay_takes_no_site_for_one",),
    ),
    Mutation(
        name="a site stays attached when its certificate is over",
        rule="who has no certificate any more is not called by a relay",
        where="node.relay.server:RelayServer._speak",
        old="asyncio.timeout(expires_s - self._machine.wall_time())",
        new="asyncio.timeout(None)",
        tests=(f"{SERVER}::test_a_site_is_attached_no_longer_than_its_certificate_holds",),
    ),
    Mutation(
        name="silent strangers fill a relay",
        rule="connections that have not said what they are for are bounded",
        where="node.relay.server:RelayServer._accept",
        old="len(self._strangers) > MAX_STRANGERS",
        new="False",
        tests=(f"{SERVER}::test_silent_strangers_make_room_for_others_and_have_no_long_time",),
    ),
    Mutation(
        name="any process of the machine calls by a node's socket",
        rule="a socket through which gRPC comes to a relay takes its own process alone",
        where="node.relay.forwarders:Forwarder.run",
        old="_process_of(connection) != os.getpid()",
        new="False",
        tests=(f"{SERVER}::test_a_socket_of_this_process_takes_no_other_one",),
    ),
    Mutation(
        name="the end of what one side says is not passed on",
        rule="each direction of a relayed connection ends by itself",
        where="node.relay.splice:_Direction._read",
        old="self._sink_socket.shutdown(socket.SHUT_WR)",
        new="pass",
        tests=(f"{SPLICE}::test_both_ways_at_once_and_each_end_by_itself",),
    ),
    Mutation(
        name="a reset becomes an end",
        rule="a reset of a relayed connection is passed on as one",
        where="node.relay.splice:Splice.abort",
        old="connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)",
        new="pass",
        tests=(f"{SPLICE}::test_a_reset_is_passed_on",),
    ),
    Mutation(
        name="a site is behind a relay by another one's name",
        rule="a site is reached by a relay under its own name alone",
        where="protocol.addresses:problem_with",
        old="found.name != name",
        new="False",
        tests=(f"{REFUSED}::test_a_site_is_behind_a_relay_by_its_own_name_and_its_certificate_alone",),
    ),
    Mutation(
        name="relays in plain text",
        rule="a run in plain text has no relays",
        where="coordinator.core.sites.admission:_refusal",
        old="if certified is None and addresses.relayed(message.address) is not None:",
        new="if False:",
        tests=(f"{REFUSED}::test_a_site_is_behind_a_relay_by_its_own_name_and_its_certificate_alone",),
    ),
    Mutation(
        name="a stranger's machine that is said to be a relay is dialled often",
        rule="an address is dialled at a bounded pace, whichever sites are said to be behind it",
        where="node.exchange.peers.dialer:Dialer._queued_for",
        old="return address if behind is None or is_known else behind.relay",
        new="return address",
        tests=(
            f"{DIALER}::test_a_machine_that_was_never_a_relay_is_dialled_seldom_whichever_sites_are_said_to_be_behind_it",
        ),
    ),
    Mutation(
        name="the environment leads past a proxy",
        rule="whether a proxy is used is said to the node alone",
        where="protocol.transport:channel_options",
        old='os.environ[NO_PROXY] = ""',
        new="pass",
        tests=("tests/unit/cli/test_relay.py::test_a_machine_dials_through_a_proxy_only_if_one_is_named",),
    ),
    Mutation(
        name="a relay waits for a coordinator whose machine is lost",
        rule="of several coordinators a relay leads to the one that answers",
        where="node.relay.outgoing:connect_first",
        old="limit_s=NEXT_AFTER_S",
        new="limit_s=None",
        tests=("tests/unit/relay/test_addresses.py",),
    ),
    Mutation(
        name="a moment without descriptors ends a socket towards a relay",
        rule="what listens goes on after an error of this machine",
        where="node.relay.accepting:connections",
        old="            continue\n",
        new="            return\n",
        tests=("tests/unit/relay/test_addresses.py",),
    ),
)
