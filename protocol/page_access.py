"""Who may look at pages over HTTP, and by which name of the machine.

On loopback whoever is on the machine may, by a name of loopback: a site in somebody's browser that gives its own name
that address is refused (DNS rebinding). Elsewhere only by TLS, and with a viewer's token: in a header, or for a browser
in a cookie that no script reads."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Collection
from typing import Protocol
from urllib.parse import parse_qs

from atoll.protocol.http import Answer, Request, plain_text

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "atoll-viewer"
BEARER = "bearer "
_FORM = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>atoll</title>
<form method="post" action="/login"><p><label>A viewer's token of this run (<code>atoll token --viewer NAME
</code>)<br><input name="token" type="password" autocomplete="off" autofocus required></label>
<button>Look</button></form></html>
"""
_FORM_POLICY = {"Content-Security-Policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'"}


class Access(Protocol):
    @property
    def tls(self) -> ssl.SSLContext | None:
        """None for plain HTTP."""

    def refusal(self, request: Request) -> Answer | None:
        """What is answered in place of the page; None if that may be seen."""


class ByName:
    """Whoever reaches the port, by one of these names; without names by any."""

    tls = None

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def refusal(self, request: Request) -> Answer | None:
        return _foreign(request, self._names) or (
            None if request.method == "GET" else plain_text(405, "pages can be read only")
        )


class ByToken:
    """By TLS, whoever has a token that is good."""

    def __init__(self, names: Collection[str], tls: ssl.SSLContext, is_good: Callable[[str], bool]) -> None:
        self._names = frozenset(names)
        self._tls = tls
        self._is_good = is_good

    @property
    def tls(self) -> ssl.SSLContext:
        return self._tls

    def refusal(self, request: Request) -> Answer | None:
        if (foreign := _foreign(request, self._names)) is not None:
            return foreign
        if request.method == "POST" and request.path == "/login":
            return self._login(request)
        if request.method != "GET":
            return plain_text(405, "pages can be read only")
        if any(self._is_good(token) for token in _tokens(request)):
            return None
        if "text/html" in request.headers.get("accept", ""):
            return Answer(401, "text/html; charset=utf-8", _FORM, _FORM_POLICY)
        return plain_text(
            401, "a viewer's token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
        )

    def _login(self, request: Request) -> Answer:
        try:
            token = parse_qs(request.body.decode("ascii"), max_num_fields=4).get("token", [""])[0].strip()
        except ValueError:
            token = ""
        if not self._is_good(token):
            return Answer(401, "text/html; charset=utf-8", _FORM, _FORM_POLICY)
        cookie = f"{COOKIE}={token}; Path=/; Secure; HttpOnly; SameSite=Strict"
        return plain_text(303, "welcome", {"Location": "/", "Set-Cookie": cookie})


def _tokens(request: Request) -> list[str]:
    """That it shows."""
    said = request.headers.get("authorization", "")
    found = [said[len(BEARER) :].strip()] if said[: len(BEARER)].lower() == BEARER else []
    for part in request.headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            found.append(value)
    return found[:2]


def _foreign(request: Request, names: frozenset[str]) -> Answer | None:
    """Whoever calls this machine by a name that it does not have."""
    host = request.headers.get("host")
    if not names or host is None or (name := _name_of(host)) in names or _is_number(name):
        return None
    return plain_text(421, "this machine has not that name here: see --http-name")


def _is_number(name: str) -> bool:
    """A site in somebody's browser comes by its name: a number is nobody's."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Without the port; of an IPv6 address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
