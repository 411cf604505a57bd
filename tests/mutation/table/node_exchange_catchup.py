"""Nodes that catch up, and their donors."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="the state where catching up begins is hashed in the loop",
        rule="nothing that grows with the model runs in an event loop",
        where="node.exchange.catchup.fetch:Fetch.run",
        old="await self._in_pool(self._trust_own_state)",
        new="self._trust_own_state()",
        tests=(
            "tests/unit/local/test_steps_in_a_loop.py"
            "::test_no_callback_of_a_site_that_catches_up_goes_through_all_chunks",
        ),
    ),
    Mutation(
        name="what has to be fetched is looked up in the loop",
        rule="nothing that grows with the model runs in an event loop",
        where="node.exchange.catchup.fetch:Fetch._fetch_chunks",
        old="            await self._in_pool(self._needed),",
        new="            self._needed(),",
        tests=(
            "tests/unit/local/test_steps_in_a_loop.py"
            "::test_no_callback_of_a_site_that_catches_up_goes_through_all_chunks",
        ),
    ),
    Mutation(
        name="a hash list of a donor is checked in the loop",
        rule="nothing that grows with the model runs in an event loop",
        where="node.exchange.catchup.fetch:Fetch._ask_lists",
        old="await self._in_pool(partial(self._index.add_list, commit, hashes)):",
        new="self._index.add_list(commit, hashes):",
        tests=("tests/process/test_catchup.py",),
    ),
    Mutation(
        name="the commits of chunks are looked up in the loop",
        rule="nothing that grows with the model runs in an event loop",
        where="node.exchange.catchup.fetch:Fetch._replay",
        old="versions = self._index.newest, self._index.history, await self._in_pool(self._versions)",
        new="versions = self._index.newest, self._index.history, self._versions()",
        tests=(
            "tests/unit/local/test_steps_in_a_loop.py"
            "::test_no_callback_of_a_site_that_catches_up_goes_through_all_chunks",
        ),
    ),
    Mutation(
        name="chunks that are behind are looked up in the loop",
        rule="nothing that grows with the model runs in an event loop",
        where="node.exchange.catchup.fetch:Fetch._apply",
        old="iter(await self._in_pool(at_the_commit_before))",
        new="iter(at_the_commit_before())",
        tests=(
            "tests/unit/local/test_steps_in_a_loop.py"
            "::test_no_callback_of_a_site_that_catches_up_goes_through_all_chunks",
        ),
    ),
    Mutation(
        name="a donor that brings nothing when it is asked alone ends the fetch",
        rule="a donor of wrong payloads holds up nobody",
        where="node.exchange.catchup.fetch:Fetch._payloads",
        old="except (PeerError, StateError) as error:",
        new="except StateError as error:",
        tests=(
            "tests/process/test_catchup.py::test_a_donor_of_wrong_payloads_that_falls_silent_when_it_is_asked_alone_holds_up_nobody",
        ),
    ),
    Mutation(
        name="a donor of wrong payloads is asked with the others at each commit",
        rule="the donor that was right alone is asked first, and alone",
        where="node.exchange.catchup.fetch:Fetch._payloads",
        old="self._asked_alone = key",
        new="pass",
        tests=(
            "tests/process/test_catchup.py::test_a_donor_of_wrong_payloads_that_falls_silent_when_it_is_asked_alone_holds_up_nobody",
        ),
    ),
    Mutation(
        name="a commit that a donor has made up is waited for",
        rule="a chunk of a commit that the coordinator does not know is no reason to wait",
        where="node.exchange.catchup.fetch:Fetch._list_of",
        old="if version > self._index.newest:",
        new="if False:",
        tests=("tests/process/test_catchup.py::test_a_donor_of_a_commit_that_nobody_knows_is_passed_over_at_once",),
    ),
    Mutation(
        name="payloads that some lack are waited for from the others for ever",
        rule="where some donors lack payloads and the others bring nothing, chunks are fetched",
        where="node.exchange.catchup.donors:Donors.share_out",
        old="if all_may_lack and lacking and self._is_stalled:",
        new="if False:",
        tests=(
            "tests/process/test_catchup.py::test_where_some_lack_payloads_and_another_is_always_busy_chunks_are_fetched",
        ),
    ),
    Mutation(
        name="a chunk that is on its way is no progress",
        rule="bytes of chunks count as they come",
        where="node.exchange.catchup.donor_client:DonorClient.chunks",
        old="self._moved(response.chunks)",
        new="pass",
        tests=("tests/unit/exchange/test_donors.py::test_a_chunk_counts_as_it_comes_and_not_when_it_is_whole",),
    ),
    Mutation(
        name="busy donors end a fetch that another one serves",
        rule="donors that are busy are no stall while a request is served",
        where="node.exchange.catchup.donors:Donors._check_busy",
        old="if not any(client.moved_at > since for client in self._clients.values()):",
        new="if True:",
        tests=(
            "tests/unit/exchange/test_donors.py"
            "::test_donors_that_are_busy_are_no_stall_while_another_request_is_served",
        ),
    ),
    Mutation(
        name="donors that are busy are no stall",
        rule="a donor that gives nothing does not hold up who catches up",
        where="node.exchange.catchup.donors:Donors._check_busy",
        old="if not any(client.moved_at > since for client in self._clients.values()):",
        new="if False:",
        tests=(
            "tests/unit/exchange/test_donors.py::test_a_request_that_brings_nothing_does_not_hold_up_a_fetch_whose_donor_is_busy",
        ),
    ),
    Mutation(
        name="a donor may be busy amid its answer",
        rule="a donor that gives nothing does not hold up who catches up",
        where="node.exchange.catchup.donor_client:DonorClient._call",
        old="if not has_begun:",
        new="if True:",
        tests=("tests/unit/exchange/test_donors.py::test_a_donor_that_is_busy_amid_its_answer_has_failed",),
    ),
    Mutation(
        name="a donor does not say that it dialled in vain",
        rule="a peer that is not reached is dialled less and less often",
        where="node.exchange.catchup.donations:Donations._one",
        old="self.dialer.failed(member)",
        new="pass",
        tests=(
            "tests/unit/exchange/test_dialling.py::test_a_peer_that_was_dialled_in_vain_is_dialled_later_whoever_wants_it",
        ),
    ),
    Mutation(
        name="a donor waits for the lock of its log in the loop",
        rule="what waits for a disk has no place in an event loop",
        where="node.exchange.catchup.donor_server:DonorServer.payloads",
        old="await asyncio.get_running_loop().run_in_executor(self.pool, self.log.record, request.commit)",
        new="self.log.record(request.commit)",
        tests=("tests/process/test_catchup.py::test_a_site_that_lacks_commits_fetches_payloads_only",),
    ),
    Mutation(
        name="a slow reader keeps its place",
        rule="a place at a donor is lent for a turn",
        where="node.exchange.catchup.donor_server:DonorServer._has_room",
        old="        first.task.cancel()\n        return True",
        new="        return False",
        tests=(
            "tests/unit/exchange/test_slow_readers.py"
            "::test_the_reader_that_has_had_its_place_for_longest_gives_way_after_its_turn",
        ),
    ),
    Mutation(
        name="a reader that hardly reads keeps its place",
        rule="who takes what it asked for has to be as fast as the slowest that a site may be",
        where="node.exchange.catchup.donor_server:DonorServer._write",
        old="                if problem:",
        new="                if problem and False:",
        tests=("tests/unit/exchange/test_slow_readers.py",),
    ),
    Mutation(
        name="everybody joins from the same donors",
        rule="sites that join one after the other ask different donors",
        where="node.exchange.catchup.donors:Donors._in_order",
        old="first = ids[ring.place(self.header.site_id, len(ids))] if ids else 0",
        new="first = ids[0] if ids else 0",
        tests=("tests/unit/exchange/test_donors.py",),
    ),
    Mutation(
        name="a site that catches up does not say that it dialled in vain",
        rule="a peer that is not reached is dialled less and less often",
        where="node.exchange.catchup.donors:Donors.failed",
        old="self.dialer.failed(client.donor)",
        new="pass",
        tests=("tests/unit/exchange/test_dialling.py",),
    ),
    Mutation(
        name="a donor that has dialled is forgotten when others are asked for",
        rule="donors that have dialled a site stay its donors",
        where="node.exchange.catchup.donors:Donors.ask_again",
        old="here = [donor for donor in self.index.donors if self.expected.is_here(donor)]",
        new="here: list[Donor] = []",
        tests=(
            "tests/unit/exchange/test_donors.py::test_one_that_dialled_is_asked_though_the_coordinator_tells_of_others_now",
        ),
    ),
    Mutation(
        name="an audit sends a donor away for which another audit waits",
        rule="a donor is expected until all that want it are done",
        where="node.exchange.catchup.expected_donors:ExpectedDonors.forget",
        old="self._of_audits -= Counter(sites)",
        new="self._of_audits.clear()",
        tests=("tests/unit/exchange/test_expected_donors.py",),
    ),
    Mutation(
        name="a stream that ends is an answer",
        rule="an answer over a donor's own connection is whole only if the donor says so",
        where="node.exchange.catchup.expected_donors:_Asked.read",
        old='            raise PeerError(f"{self.where}: its stream broke", self.site[0])',
        new="            return None",
        tests=("tests/unit/exchange/test_expected_donors.py",),
    ),
    Mutation(
        name="whoever dials is a donor",
        rule="nobody gives state over a connection of its own unless it was asked to",
        where="node.exchange.catchup.expected_donors:ExpectedDonors.accept",
        old="streams = self._streams.get(site)\n        if streams is None:\n            raise",
        new="streams = self._streams.setdefault(site, [])\n        if streams is None:\n            raise",
        tests=("tests/unit/exchange/test_expected_donors.py",),
    ),
    Mutation(
        name="a donor that has dialled is lost with the next answer",
        rule="donors that have dialled a site stay its donors",
        where="node.exchange.catchup.index:Index.learn",
        old="if len(sources.donors) >= MAX_LISTED_DONORS:",
        new="if False:",
        tests=("tests/unit/exchange/test_index.py",),
    ),
    Mutation(
        name="unattested hash list is believed",
        rule="a joiner checks each hash list against the attested state hash",
        where="node.exchange.catchup.index:Index.add_list",
        old="if self.attested.get(commit) != state_hash(self.manifest, self.slots, hashes):",
        new="if False:",
        tests=("tests/unit/exchange/test_index.py",),
    ),
    Mutation(
        name="lists are looked at while a thread adds one",
        rule="a list may be added while chunks are checked",
        where="node.exchange.catchup.index:Index.lists_with",
        old="in tuple(self.lists.items()):",
        new="in self.lists.items():",
        tests=("tests/unit/exchange/test_index.py",),
    ),
    Mutation(
        name="a chunk of another version is taken for the commit that is wanted",
        rule="a fetch of commit n takes of each chunk the version at n, and no other",
        where="node.exchange.catchup.index:Index.lists_with",
        old="else touched and touched[fragment]) == version:",
        new="else commit) >= version:",
        tests=("tests/unit/exchange/test_index.py",),
    ),
    Mutation(
        name="payloads of other fragments are needed for a chunk",
        rule="a chunk is led on by the commits of its fragment alone",
        where="node.exchange.catchup.index:Index.leads_on",
        old="self.history.between(fragment, version, self.newest)",
        new="range(version + 1, self.newest + 1)",
        tests=("tests/unit/exchange/test_index.py",),
    ),
    Mutation(
        name="the log of a site that has fetched a state does not know of it",
        rule="after a fetch the site knows which fragments the commits before its log touched",
        where="node.exchange.catchup.fetch:Fetch._lead_log_to",
        old="        self.payload_log.lead_to(touched)\n",
        new="",
        tests=("tests/process/test_catchup.py",),
    ),
    Mutation(
        name="donors have the hashes of the last commits alone",
        rule="donors keep hash lists of as many commits as may be made while a chunk is on its way",
        where="node.dataplane.outer_state:OuterState._note_commit",
        old="max(least, most)",
        new="least",
        tests=("tests/unit/dataplane/test_outer_state.py", "tests/simulation/test_gradients.py"),
    ),
)
