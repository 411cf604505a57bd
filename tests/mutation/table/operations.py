"""What machines of sites are cared for by: what is left on disks, and what a volunteer gives."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

GARBAGE = "tests/unit/local/test_garbage.py"

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
        old="for name in (_SOCKET_NOTE, self._end_mark.name):",
        new="for name in (_SOCKET_NOTE,):",
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
        where="node.daemon.main:run_node",
        old="if code == 0 and node.core.site.disk.final:",
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
)
