"""Which requests the dashboard answers: those of its own page, in a browser on this machine.

A page of any web site can make the user's browser send requests to 127.0.0.1, and can give its own host name that
address (DNS rebinding) to read the answers. Both show in the request's headers, which no script can set.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from email.message import Message
from http import HTTPStatus

MAX_BODY_BYTES = 1 << 16
"""A prompt is at most some thousand characters."""
TOKEN_HEADER = "X-Gptlab-Token"

PAGE_HEADERS: Mapping[str, str] = {
    # No inline code, nothing from elsewhere: text of a run that came to be markup in spite of all would be inert.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

Refusal = tuple[HTTPStatus, str]
"""The status of the answer, and why, in one line."""


def refusal(method: str, target: str, headers: Message, *, port: int, token: str) -> Refusal | None:
    """Why a request is not answered; None for one that is.

    Every request must name a loopback host with the server's port, and must not come from another site. What computes
    or streams needs the token, which only the server's own page has: in a header for POST, in the query for /events
    (a browser's EventSource sends no headers of its own).
    """
    hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
    values = {name: headers.get_all(name) or [] for name in ("Host", "Origin", "Sec-Fetch-Site", "Content-Type")}
    if len(values["Host"]) != 1 or values["Host"][0].lower() not in hosts:
        return HTTPStatus.MISDIRECTED_REQUEST, f"open this page as http://{hosts[0]}/"
    if any(origin.lower() not in [f"http://{host}" for host in hosts] for origin in values["Origin"]):
        return HTTPStatus.FORBIDDEN, "requests of other sites are refused"
    if any(site not in ("same-origin", "none") for site in values["Sec-Fetch-Site"]):
        return HTTPStatus.FORBIDDEN, "requests of other sites are refused"
    path, _, query = target.partition("?")
    given = [query.removeprefix("token=")] if query.startswith("token=") else []
    if method == "POST":
        if values["Content-Type"] != ["application/json"]:
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content must be application/json"
        given = headers.get_all(TOKEN_HEADER) or []
    elif method != "GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, "only GET and POST"
    elif path != "/events":
        return None
    if len(given) != 1 or not hmac.compare_digest(given[0].encode(), token.encode()):
        return HTTPStatus.FORBIDDEN, "the token is not this server's: reload the page"
    return None


def body_bytes(headers: Message) -> int | Refusal:
    """How long the content of a POST is."""
    lengths = headers.get_all("Content-Length") or []
    if headers.get_all("Transfer-Encoding") or len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        return HTTPStatus.LENGTH_REQUIRED, "the request needs one Content-Length"
    if len(lengths[0]) > 9 or int(lengths[0]) > MAX_BODY_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES:,} bytes"
    return int(lengths[0])
