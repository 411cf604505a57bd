"""What is taken from outside: the front door, paces, calls of one certificate, plain text."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

COUNTS = "tests/unit/coordinator/test_door_counts.py"
DOOR = "tests/process/test_front_door.py"

MUTATIONS = (
    Mutation(
        name="an address has as many strangers' connections as it likes",
        rule="connections on which nobody has shown a certificate have a bound by address",
        where="coordinator.door_counts:Counts.come",
        old="if len(self._of_source.get(source, ())) >= self._per_address:",
        new="if False:",
        tests=(f"{DOOR}::test_an_address_at_its_bound_is_refused_and_another_one_gets_in",),
    ),
    Mutation(
        name="sites that are in use up the pace of their address",
        rule="a connection with a certificate does not count for its address",
        where="coordinator.door_counts:Counts.is_of",
        old="            self._came.give_back(guest.source, now)",
        new="            pass",
        tests=(f"{COUNTS}::test_sites_that_are_in_do_not_count_for_the_address_that_they_share",),
    ),
    Mutation(
        name="a node that starts again is locked out by its dead connections",
        rule="the newest connections of a certificate stay",
        where="coordinator.door_counts:Counts.is_of",
        old="tuple(own)[: -limits.MAX_CONNECTIONS_OF_ONE]",
        new="tuple(own)[limits.MAX_CONNECTIONS_OF_ONE :]",
        tests=(f"{DOOR}::test_the_oldest_connection_of_a_certificate_makes_room",),
    ),
    Mutation(
        name="strangers keep all places for handshakes",
        rule="whoever takes long over a handshake makes room where others wait",
        where="coordinator.door_counts:Counts.late",
        old="if any(self._waiting.values()):",
        new="if False:",
        tests=(f"{COUNTS}::test_whoever_takes_long_over_a_handshake_makes_room_where_others_wait",),
    ),
    Mutation(
        name="handshakes have no bound",
        rule="so many handshakes are under way at once",
        where="coordinator.door_counts:Counts.enter",
        old="if len(self._entered) >= limits.MAX_HANDSHAKES:",
        new="if False:",
        tests=(f"{COUNTS}::test_so_many_handshakes_are_under_way_and_the_others_wait_for_places",),
    ),
    Mutation(
        name="a call that waits for the coordinator counts as a handshake",
        rule="whoever is through its handshake leaves its place, and has time until its call is taken",
        where="coordinator.door_counts:Counts.through",
        old="            guest.until_s = now + limits.FIRST_CALL_LIMIT_S\n",
        new="",
        tests=(f"{COUNTS}::test_whoever_is_through_its_handshake_makes_room_and_has_time_to_be_heard",),
    ),
    Mutation(
        name="an alert is taken for a handshake that ended well",
        rule="nobody without a certificate gets through a handshake",
        where="coordinator.guest:Guest._behind_says",
        old="self._num_said_behind > MOST_ALERT_BYTES",
        new="self._num_said_behind > 0",
        tests=(f"{DOOR}::test_an_alert_is_no_handshake_that_ended_well",),
    ),
    Mutation(
        name="whoever says nothing stays",
        rule="a connection on which nobody shows a certificate in time is closed",
        where="coordinator.front_door:FrontDoor._look",
        old="        self._end(self._counts.late(now), Turned.SILENT)\n",
        new="",
        tests=(f"{DOOR}::test_whoever_does_not_show_a_certificate_in_time_has_to_go",),
    ),
    Mutation(
        name="a call that came past the door counts nowhere",
        rule="every call to the coordinator comes by its port",
        where="coordinator.front_door:FrontDoor.is_of",
        old="if not self._counts.is_here(number):",
        new="if False:",
        tests=(f"{DOOR}::test_a_call_that_came_past_the_door_is_refused",),
    ),
    Mutation(
        name="the door reads on while it cannot write",
        rule="the front door holds one buffer of a connection and loses nothing",
        where="coordinator.guest:_Way._write",
        old="                self._loop.remove_reader(self._source)\n",
        new="",
        tests=(f"{DOOR}::test_whoever_is_not_read_has_to_wait_and_loses_nothing",),
    ),
    Mutation(
        name="the kernel drops nobody",
        rule="an address that floods is dropped by the kernel",
        where="coordinator.shut_out:_program",
        old="(_RETURN, 0, 0, 0)\n",
        new="(_RETURN, 0, 0, 0xFFFFFFFF)\n",
        tests=(f"{DOOR}::test_an_address_that_floods_is_dropped_by_the_kernel",),
    ),
    Mutation(
        name="a flood of messages is read as it comes",
        rule="a stream is read no faster than a site has to say, by kind of message",
        where="coordinator.streams:Stream._in_its_time",
        old="await asyncio.sleep(wait_s)",
        new="await asyncio.sleep(0)",
        tests=(
            "tests/process/test_coordinator_session.py"
            "::test_a_site_that_floods_one_kind_of_message_waits_and_others_do_not",
        ),
    ),
    Mutation(
        name="a viewer asks as often as it likes",
        rule="calls have a pace by certificate and method",
        where="coordinator.service:CoordinatorServer._let_in",
        old="if not self._calls.take((method, caller.subject), self._loop.time()):",
        new="if False:",
        tests=(f"{DOOR}::test_a_crowd_of_viewers_is_bounded_by_certificate_and_not_by_address",),
    ),
    Mutation(
        name="one site has all calls of a node",
        rule="a site has so many calls under way at a node",
        where="node.limits:CallsOfSites.let_in",
        old="if self._num[name] >= MAX_CALLS_OF_SITE:",
        new="if False:",
        tests=(
            "tests/unit/trust/test_security.py::test_one_site_has_so_many_calls_under_way_at_a_node_and_another_one_has_its_own",
        ),
    ),
    Mutation(
        name="plain text beyond this machine is not asked about",
        rule="plain text beyond loopback has to be forced",
        where="protocol.trust.plain_text:check",
        old="if address and not is_loopback(address):",
        new="if False:",
        tests=("tests/unit/trust/test_plain_text.py",),
    ),
    Mutation(
        name="a clock that goes back fills buckets",
        rule="a rest saves up no more than a bucket holds, and time that goes back nothing",
        where="protocol.pace:Buckets._now",
        old="max(0.0, now - since)",
        new="abs(now - since)",
        tests=("tests/unit/protocol/test_pace.py::test_a_clock_that_goes_back_gives_nothing",),
    ),
)
