"""The command line."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="a limit of nothing is no limit",
        rule="0 said for a limit is refused",
        where="src.atoll.cli.node:limit.read_limit",
        old="(found := read(text)) <= 0",
        new="(found := read(text)) < 0",
        tests=("tests/unit/cli/test_command_line.py::test_a_limit_of_nothing_is_not_taken_for_none",),
    ),
    Mutation(
        name="a coordinator's words steer the terminal of a dry run",
        rule="text from outside reaches no terminal with control characters",
        where="src.atoll.cli.dry_run:_print",
        old="{whole(text)}",
        new="{text}",
        tests=("tests/unit/cli/test_dry_run.py::test_what_a_coordinator_says_does_not_steer_the_terminal",),
    ),
    Mutation(
        name="text is not drawn from a model whose save was killed",
        rule="a saved model is found by its own name by every verb",
        where="src.atoll.cli.sample:run",
        old="if not where_saved(args.folder).is_dir():",
        new="if not args.folder.is_dir():",
        tests=(
            "tests/unit/worker/test_worker_model.py::test_a_model_between_the_two_renames_of_a_save_is_found_by_its_own_name",
        ),
    ),
    Mutation(
        name="people are not told of a weight that was cut",
        rule="a weight that is cut is said",
        where="src.atoll.cli.status:notes",
        old="        *_newest_cut(status),\n",
        new="",
        tests=("tests/unit/cli/test_status_data.py",),
    ),
    Mutation(
        name="the table says of a member that it is one, and not what it does",
        rule="a state is told by its kind, and not by the words of it",
        where="src.atoll.cli.status:rows",
        old='site.state_kind != "member"',
        new='site.state_kind != "gone"',
        tests=("tests/unit/cli/test_demo_watch.py::test_the_table_says_what_the_status_says",),
    ),
    Mutation(
        name="any pipe that breaks is a reader that has gone",
        rule="an error ends a service with its exit code",
        where="src.atoll.cli.main:main",
        old="0 if _is_unread() else _failed(args, error)",
        new="0",
        tests=("tests/unit/cli/test_output.py::test_another_pipe_that_breaks_is_an_error",),
    ),
    Mutation(
        name="an invite in a file is for everybody",
        rule="what lets somebody into a run is for its owner alone",
        where="src.atoll.cli.invite:_invite",
        old='text.encode() + b"\\n")',
        new='text.encode() + b"\\n", mode=0o644)',
        tests=("tests/unit/cli/test_invite.py::test_the_file_of_an_invite_is_for_its_owner_alone",),
    ),
    Mutation(
        name="an invite that was typed as a word is said again",
        rule="no secret is in what a command says",
        where="src.atoll.cli.join:read_invite",
        old="if PREFIX in str(path) or",
        new="if",
        tests=("tests/unit/cli/test_join.py::test_an_invite_that_is_a_word_of_the_command_is_not_said_again",),
    ),
    Mutation(
        name="half an invite that was typed as a word is said again",
        rule="no secret is in what a command says",
        where="src.atoll.cli.join:read_invite",
        old=" or error.errno == errno.ENAMETOOLONG",
        new="",
        tests=("tests/unit/cli/test_join.py::test_an_invite_that_is_a_word_of_the_command_is_not_said_again",),
    ),
    Mutation(
        name="what is no text ends a join with a traceback",
        rule="what a person gives that is no invite is said to be none",
        where="src.atoll.cli.join:read_invite",
        old="except (EOFError, UnicodeDecodeError):",
        new="except KeyError:",
        tests=("tests/unit/cli/test_join.py::test_what_is_no_text_is_no_invite",),
    ),
    Mutation(
        name="a copy is said to be where it is not",
        rule="a command says that it has done what it has done",
        where="src.atoll.cli.backup:run",
        old="if not to.is_file():",
        new="if False:",
        tests=("tests/unit/coordinator/test_admin.py::test_a_copy_that_is_not_where_it_was_asked_for_is_none",),
    ),
    Mutation(
        name="the node of a unit does not find what is beside where it was written",
        rule="a unit starts the node as the command would have",
        where="src.atoll.cli.unit",
        old="WorkingDirectory=-{folder}\n",
        new="",
        tests=("tests/unit/cli/test_unit.py::test_a_user_gets_a_unit_of_their_own",),
    ),
)
