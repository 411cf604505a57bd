"""Who makes the starting state, and what becomes of it when the coordinator names another site meanwhile."""

from __future__ import annotations

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind
from atoll.protocol import messages as m
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, opened

OTHER_HASH = bytes([7]) * 32
SOURCES = m.Sources(
    attested=(m.Attestation(commit=0, state_hash=OTHER_HASH),),
    donors=(m.Donor(site_id=2, incarnation=1, address="b:1", commit=0),),
)
JOINER = m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7)


def writing() -> Driver:
    """Named the seeder; its workers write the starting state."""
    drive = Driver()
    drive.up_to_admitted(m.AdmittedAs.SEEDER)
    drive.ask(0)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    return drive


def seeded() -> Driver:
    drive = writing()
    drive.sealed(0)
    drive.wants(out.SeedState)
    drive(e.StateSeeded(state_hash=HASH))
    return drive


def test_23_who_made_the_starting_state_rolls_back_like_any_other() -> None:
    drive = seeded()
    drive.receive(opened(1, 0))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.wants(out.RollBack)


def test_who_lost_against_another_starting_state_makes_it_when_it_is_named_again() -> None:
    drive = seeded()
    drive.receive(m.Evicted(reason="silent"))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7, state_hash=OTHER_HASH))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=7))
    drive.out.clear()
    drive.ask(0, 1)
    assert drive.answer().kind is AnswerKind.SNAPSHOT


def test_a_joiner_does_not_make_a_state_of_what_it_wrote_as_a_seeder() -> None:
    drive = writing()
    drive.receive(JOINER)
    drive.receive(SOURCES)
    drive.wants(out.FetchState)
    drive.sealed(0)
    assert not [o for o in drive.out if isinstance(o, out.SeedState)]


def test_nothing_is_fetched_while_the_starting_state_is_made() -> None:
    """Both would write the outer state. What was made is compared with the run's afterwards."""
    drive = writing()
    drive.sealed(0)
    drive.wants(out.SeedState)
    drive.receive(JOINER)
    drive.receive(SOURCES)
    assert not [o for o in drive.out if isinstance(o, out.FetchState)]
    drive.out.clear()
    drive(e.StateSeeded(state_hash=HASH))
    assert not [o for o in drive.out if isinstance(o, out.FetchState)], "it has what it was to fetch"
    (applied,) = [o.message for o in drive.out if isinstance(o, out.Send) and isinstance(o.message, m.Applied)]
    assert (applied.commit, applied.state_hash) == (0, HASH)
