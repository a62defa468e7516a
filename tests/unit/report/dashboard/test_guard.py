"""Requests of other sites, other names and other programs' pages are refused."""

from __future__ import annotations

from email.message import Message
from http import HTTPStatus

import pytest

from gptlab.report.dashboard.guard import MAX_BODY_BYTES, TOKEN_HEADER, body_bytes, refusal

OWN = {"Host": "127.0.0.1:8327"}
POST = {"Content-Type": "application/json", TOKEN_HEADER: "secret"}


def headers(*items: tuple[str, str], **more: str) -> Message:
    message = Message()
    for name, value in (*items, *more.items()):
        message[name] = value
    return message


def status(method: str, target: str, *items: tuple[str, str]) -> HTTPStatus | None:
    refused = refusal(method, target, headers(*items), port=8327, token="secret")
    return refused and refused[0]


@pytest.mark.parametrize("host", ["127.0.0.1:8327", "localhost:8327", "LOCALHOST:8327", "[::1]:8327"])
def test_loopback_names_are_answered(host: str) -> None:
    assert status("GET", "/", ("Host", host)) is None
    assert status("GET", "/", ("Host", host), ("Origin", f"http://{host}"), ("Sec-Fetch-Site", "same-origin")) is None
    assert status("GET", "/", ("Host", host), ("Sec-Fetch-Site", "none")) is None


@pytest.mark.parametrize(
    "hosts",
    [
        [], ["evil.example:8327"], ["127.0.0.1"], ["127.0.0.1:80"], ["127.0.0.1:8327.evil.example"], ["0.0.0.0:8327"],
        ["127.0.0.1:8327", "evil.example"], ["127.0.0.2:8327"], [""], ["localhost:8327 "], ["user@localhost:8327"],
    ],
)  # fmt: skip
def test_other_hosts_are_refused(hosts: list[str]) -> None:
    """DNS rebinding: the browser names the host that it believes to talk to."""
    assert status("GET", "/", *(("Host", host) for host in hosts)) == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Origin", "http://evil.example"), ("Origin", "null"), ("Origin", "http://localhost:3000"),
        ("Origin", "https://127.0.0.1:8327"), ("Origin", "http://127.0.0.1:8327.evil.example"),
        ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site"), ("Sec-Fetch-Site", ""),
    ],
)  # fmt: skip
def test_requests_of_other_sites_are_refused(name: str, value: str) -> None:
    assert status("GET", "/", *OWN.items(), (name, value)) == HTTPStatus.FORBIDDEN
    assert status("POST", "/prompt", *OWN.items(), *POST.items(), (name, value)) == HTTPStatus.FORBIDDEN


def test_what_computes_needs_the_token() -> None:
    assert status("POST", "/prompt", *OWN.items(), *POST.items()) is None
    for token in ("", "Secret", "secret ", "sécret", "secret2"):
        given = POST | {TOKEN_HEADER: token}
        assert status("POST", "/prompt", *OWN.items(), *given.items()) == HTTPStatus.FORBIDDEN
    without = ("Content-Type", "application/json")
    assert status("POST", "/prompt", *OWN.items(), without) == HTTPStatus.FORBIDDEN
    assert status("POST", "/prompt?token=secret", *OWN.items(), without) == HTTPStatus.FORBIDDEN
    assert status("POST", "/prompt", *OWN.items(), *POST.items(), (TOKEN_HEADER, "secret")) == HTTPStatus.FORBIDDEN


def test_the_stream_of_events_needs_the_token() -> None:
    assert status("GET", "/events?token=secret", *OWN.items()) is None
    for query in ("", "?token=", "?token=x", "?a=b&token=secret", "?secret", "?token=secret&token=secret"):
        assert status("GET", f"/events{query}", *OWN.items()) == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_forms_are_refused(kind: str) -> None:
    """What a page may send to another site without asking."""
    refused = status("POST", "/prompt", *OWN.items(), ("Content-Type", kind), (TOKEN_HEADER, "secret"))
    assert refused == HTTPStatus.UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "get"])
def test_other_methods_are_refused(method: str) -> None:
    assert status(method, "/", *OWN.items()) == HTTPStatus.METHOD_NOT_ALLOWED


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("Content-Length", "12")], 12),
        ([("Content-Length", str(MAX_BODY_BYTES))], MAX_BODY_BYTES),
        ([("Content-Length", str(MAX_BODY_BYTES + 1))], HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ([("Content-Length", "9" * 5000)], HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ([], HTTPStatus.LENGTH_REQUIRED),
        ([("Content-Length", "-1")], HTTPStatus.LENGTH_REQUIRED),
        ([("Content-Length", "²")], HTTPStatus.LENGTH_REQUIRED),
        ([("Content-Length", "1"), ("Content-Length", "2")], HTTPStatus.LENGTH_REQUIRED),
        ([("Content-Length", "1"), ("Transfer-Encoding", "chunked")], HTTPStatus.LENGTH_REQUIRED),
    ],
)
def test_how_long_a_request_may_be(given: list[tuple[str, str]], expected: int) -> None:
    found = body_bytes(headers(*given))
    assert (found if isinstance(found, int) else found[0]) == expected
