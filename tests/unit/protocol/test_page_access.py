"""Who may look at pages, by which name; and what a request is."""

from __future__ import annotations

import pytest

from atoll.protocol import http
from atoll.protocol.http import Request
from atoll.protocol.page_access import COOKIE, LOOPBACK_NAMES, ByName, ByToken

GOOD = "good-token"


def code_of(access: ByName | ByToken, **request: object) -> int:
    """200: the page may be seen."""
    asked = Request(**{"method": "GET", "path": "/", **request})  # type: ignore[arg-type]
    answer = access.refusal(asked)
    return 200 if answer is None else answer.code


def by_token(*names: str) -> ByToken:
    return ByToken(names, None, lambda token: token == GOOD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("LocalHost:7701", 200),
        ("127.0.0.1:7701", 200),
        ("[::1]:7701", 200),
        ("evil.example", 421),
        ("evil.example:7701", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.2:7701", 200),
        ("10.0.0.5", 200),
        ("10.0.0.5.", 421),
        ("", 421),
    ],
)
def test_on_loopback_names_of_others_are_refused(host: str, code: int) -> None:
    assert code_of(ByName(LOOPBACK_NAMES), headers={"host": host}) == code


def test_whoever_says_no_name_is_a_program_and_without_names_any_is_right() -> None:
    assert code_of(ByName(LOOPBACK_NAMES)) == 200
    assert code_of(ByName(()), headers={"host": "evil.example"}) == 200


@pytest.mark.parametrize("access", [ByName(()), by_token()])
def test_pages_are_read_only(access: ByName | ByToken) -> None:
    for method in ("POST", "PUT", "HEAD", "DELETE"):
        assert code_of(access, method=method, headers={"authorization": f"Bearer {GOOD}"}) == 405


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {GOOD}"}, 200),
        ({"authorization": f"bearer  {GOOD} "}, 200),
        ({"authorization": f"Basic {GOOD}"}, 401),
        ({"authorization": "Bearer other"}, 401),
        ({"authorization": GOOD}, 401),
        ({"cookie": f"{COOKIE}={GOOD}"}, 200),
        ({"cookie": f"theme=dark; {COOKIE}={GOOD}; x=y"}, 200),
        ({"cookie": f"{COOKIE}=other"}, 401),
        ({"cookie": f"x{COOKIE}={GOOD}"}, 401),
    ],
)
def test_a_token_is_shown_in_a_header_or_in_a_cookie(headers: dict[str, str], code: int) -> None:
    assert code_of(by_token(), headers=headers) == code


def test_a_token_does_not_help_whoever_comes_by_a_foreign_name() -> None:
    headers = {"authorization": f"Bearer {GOOD}", "host": "evil.example"}
    assert code_of(by_token("run.example"), headers=headers) == 421
    assert code_of(by_token("run.example"), headers=headers | {"host": "run.example:7701"}) == 200


def test_a_browser_is_asked_for_a_token_and_gets_a_cookie_that_no_script_reads() -> None:
    access = by_token()
    form = access.refusal(Request("GET", "/", {"accept": "text/html,*/*"}))
    assert form is not None
    assert (form.code, b'action="/login"' in form.body) == (401, True)
    assert "form-action 'self'" in form.headers["Content-Security-Policy"]
    welcome = access.refusal(Request("POST", "/login", body=f"token=+{GOOD}+".encode()))
    assert welcome is not None
    assert (welcome.code, welcome.headers["Location"]) == (303, "/")
    cookie, *flags = welcome.headers["Set-Cookie"].split("; ")
    assert cookie == f"{COOKIE}={GOOD}"
    assert {"Secure", "HttpOnly", "SameSite=Strict"} <= set(flags)
    assert code_of(access, headers={"cookie": cookie}) == 200


@pytest.mark.parametrize(
    "body", [b"", b"token=", b"token=other", b"\xff", b"a=1&b=2&c=3&d=4&e=5", b"tokens=good-token"]
)
def test_what_is_no_token_gets_the_form_again(body: bytes) -> None:
    assert code_of(by_token(), method="POST", path="/login", body=body) == 401


@pytest.mark.parametrize(
    ("head", "num_bytes"),
    [
        (b"POST /login HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 5),
        (b"GET / HTTP/1.0\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", -1),
        (b"POST / HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", -1),
        (b"POST / HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", -1),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", -1),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", -1),
    ],
)
def test_how_much_follows_a_head_is_bounded(head: bytes, num_bytes: int) -> None:
    request = http.read_head(head)
    assert request is not None
    assert http.body_bytes(request) == num_bytes


def test_what_is_no_request_is_none() -> None:
    for head in (
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / FTP/1.1\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
    ):
        assert http.read_head(head) is None
    request = http.read_head(b"GET /a?token=x HTTP/1.1\r\nHost: a\r\nHOST: b\r\nnonsense\r\n\r\n")
    assert request == Request("GET", "/a", {"host": "a"})
