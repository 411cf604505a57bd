"""How often the status is made, however many ask for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.coordinator import limits, web
from atoll.coordinator.status_shown import StatusShown
from atoll.protocol.http import Answer
from atoll.protocol.pace import Pace


def test_for_pages_it_has_a_pace_whatever_is_decided_and_others_hear_of_each_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "STATUS_AGE_S", 3600.0)
    monkeypatch.setattr(limits, "STATUS_OF_PAGES", Pace(at_once=3, per_s=1e-9))

    async def main() -> None:
        num_made = 0

        async def made() -> dict[str, Any]:
            nonlocal num_made
            num_made += 1
            return {"made": num_made}

        status = StatusShown(made)
        for num in (1, 2, 3, 4):
            status.kept()
            assert await status.recent() == await status.recent() == {"made": num}, "as it is, while few ask"
        for _ in range(100):
            status.kept()
            assert await status.recent() == {"made": 4}
        assert await status.text() == '{"made": 5}'
        assert await status.recent() == {"made": 5}
        assert num_made == 5

    asyncio.run(main())


def test_what_takes_longer_than_it_is_recent_is_made_once_for_all_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is stuck: each would wait for a status of its own, one after the other. Curves wait for none."""
    monkeypatch.setattr(limits, "STATUS_AGE_S", 60.0)
    clock, num_made, is_made = 0.0, 0, asyncio.Event()

    async def main() -> None:
        async def made() -> dict[str, Any]:
            nonlocal clock, num_made
            num_made += 1
            await is_made.wait()
            clock += 100
            return {"made": num_made}

        async def curves() -> dict[str, Any]:
            return {"curves": []}

        status = StatusShown(made)
        monkeypatch.setattr(status, "_loop", SimpleNamespace(time=lambda: clock))
        page = web.status_pages(status.recent, curves=curves)
        asking = [asyncio.ensure_future(page._answer("/status.json")) for _ in range(8)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            shown = await page._answer("/curves.json")
        assert shown.body == b'{"curves": []}'
        is_made.set()
        assert {answer.body for answer in await asyncio.gather(*asking)} == {b'{"made": 1}'}
        assert num_made == 1

    asyncio.run(main())


def test_an_answer_is_made_once_of_one_document_though_many_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = web._answer, list[str]()

    def counted(path: str, *rest: Any) -> Answer:
        made.append(path)
        return make(path, *rest)

    monkeypatch.setattr(web, "_answer", counted)
    document = {"state": "training"}

    async def recent() -> dict[str, Any]:
        return document

    async def main() -> None:
        page = web.status_pages(recent)
        answers = await asyncio.gather(*(page._answer("/status.json") for _ in range(64)))
        assert {answer.body for answer in answers} == {b'{"state": "training"}'}

    asyncio.run(main())
    assert made == ["/status.json"]
