"""What machines of sites are cared for by: what is left on disks, and what a volunteer gives."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

GARBAGE = "tests/unit/local/test_garbage.py"
VOLUNTEERS = "tests/process/test_volunteers.py"

MUTATIONS = (
    Mutation(
        name="what a site goes on with is always garbage",
        rule="nothing that a site needs to go on is deleted",
        where="node.daemon.garbage:_found",
        old="    if ended:\n",
        new="    if True:\n",
        tests=(GARBAGE,),
    ),
    Mutation(
        name="a site that came back is still taken for one whose run has ended",
        rule="a home is of a run that has ended until a node starts with it again",
        where="node.daemon.home:Home._remove_left_over",
        old="for path in (self.folder / _SOCKET_NOTE, self._end_mark):",
        new="for path in (self.folder / _SOCKET_NOTE,):",
        tests=(GARBAGE,),
    ),
    Mutation(
        name="the only model is garbage where it is not in place",
        rule="a model beside its place stays while none is in place",
        where="node.daemon.garbage:_found",
        old="if (model / MANIFEST_NAME).is_file():",
        new="if True:",
        tests=(GARBAGE,),
    ),
    Mutation(
        name="no home is of a run that has ended",
        rule="a home of a run that has ended holds no more than the model, logs and who the site is",
        where="node.daemon.main:_stay",
        old="if code == 0 and is_over:",
        new="if code != 0:",
        tests=("tests/process/test_gc.py",),
    ),
    Mutation(
        name="a link in a folder that is emptied is followed",
        rule="what is deleted lies in the home",
        where="node.daemon.garbage:delete",
        old="if child.is_dir() and not child.is_symlink():",
        new="if child.is_dir():",
        tests=(GARBAGE,),
    ),
    Mutation(
        name="donors send as fast as the link goes",
        rule="all that a site sends is within what its owner gives",
        where="node.exchange.catchup.donor_server:DonorServer._turn",
        old="        await self.uplink.within_cap(len(frame))\n",
        new="",
        tests=(f"{VOLUNTEERS}::test_all_that_a_site_sends_is_within_what_its_owner_gives",),
    ),
    Mutation(
        name="exchanges send as fast as the link goes",
        rule="all that a site sends is within what its owner gives",
        where="node.exchange.sync.attempt:Attempt.turn",
        old="        await self.uplink.within_cap(len(frame))",
        new="        pass",
        tests=(f"{VOLUNTEERS}::test_all_that_a_site_sends_is_within_what_its_owner_gives",),
    ),
    Mutation(
        name="time that was not used is saved up",
        rule="no time has more than its bytes and a burst that is bounded",
        where="node.exchange.peers.upload_cap:UploadCap.send",
        old="max(self._next_at, now - DEPTH_S)",
        new="self._next_at",
        tests=("tests/unit/exchange/test_upload_cap.py",),
    ),
    Mutation(
        name="a write that took long is not made up for",
        rule="all that is given is used",
        where="node.exchange.peers.upload_cap:UploadCap.send",
        old="max(self._next_at, now - DEPTH_S)",
        new="max(self._next_at, now)",
        tests=("tests/unit/exchange/test_upload_cap.py",),
    ),
    Mutation(
        name="a site stays out of the run after its time off",
        rule="a site comes back by itself",
        where="node.daemon.main:_stay",
        old="comes_back = code == 0 and not is_over",
        new="comes_back = False",
        tests=(f"{VOLUNTEERS}::test_a_site_is_in_the_run_in_its_hours_and_until_its_share_of_the_month_is_sent",),
    ),
    Mutation(
        name="a site that comes back gives up where the coordinator is away",
        rule="a site comes back by itself, also when the coordinator is away at that moment",
        where="node.daemon.main:run_node",
        old="if not run_id or num_unanswered > MAX_UNANSWERED:",
        new="if True:",
        tests=(f"{VOLUNTEERS}::test_a_site_is_in_the_run_in_its_hours_and_until_its_share_of_the_month_is_sent",),
    ),
    Mutation(
        name="each start may send all of the month again",
        rule="what was sent is counted across starts",
        where="node.daemon.time_off:Account.count",
        old="if self.sent != before:",
        new="if False:",
        tests=("tests/unit/local/test_allowance.py",),
    ),
    Mutation(
        name="a month begins anew at each look",
        rule="what was sent in a month is counted together",
        where="node.daemon.allowance:Sent.plus",
        old="if month == self.month else 0",
        new="if month != self.month else 0",
        tests=("tests/unit/local/test_allowance.py",),
    ),
    Mutation(
        name="hours over midnight are none",
        rule="hours may end on the next day",
        where="node.daemon.allowance:Hours.has",
        old="return minute >= self.begin or minute < self.end",
        new="return minute >= self.begin and minute < self.end",
        tests=("tests/unit/local/test_allowance.py",),
    ),
    Mutation(
        name="contributions on the disk are beside what its owner gives",
        rule="a home takes no more of the disk than its owner gives",
        where="node.daemon.room:room_for",
        old="        retained = min(retained, buffer + left)\n",
        new="",
        tests=("tests/unit/dataplane/test_footprint.py",),
    ),
    Mutation(
        name="a run that needs more of the disk than is given is joined",
        rule="a home takes no more of the disk than its owner gives",
        where="node.daemon.room:room_for",
        old="        if left < 0:",
        new="        if False:",
        tests=("tests/unit/dataplane/test_footprint.py",),
    ),
)
