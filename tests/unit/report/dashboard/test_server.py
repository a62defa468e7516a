"""What the dashboard answers over HTTP, and to whom."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from written_runs import write_run

from gptlab.config.errors import UserError
from gptlab.report.dashboard.guard import TOKEN_HEADER
from gptlab.report.dashboard.server import ASSETS, Dashboard

CURVE = (3.5, 2.0, 1.5)
HOSTILE = '"><script>alert(1)</script>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "runs/a", CURVE, seed=1)
    write_run(folder / "runs/b", CURVE, seed=2)
    write_run(folder / "runs" / HOSTILE.replace("/", "_"), CURVE, seed=3, model__n_layer=2)
    damaged = write_run(folder / "runs/damaged", CURVE)
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": []}\n')
    (folder / "secret.txt").write_text("secret")
    (folder / "runs/link").symlink_to(folder / "secret.txt")
    with Dashboard(folder / "runs", 0) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def request(
    server: Dashboard, method: str, path: str, value: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content of the answer. POST sends JSON with the token; `headers` replace others."""
    given = {"Host": f"127.0.0.1:{server.server_port}"}
    if method == "POST":
        given |= {"Content-Type": "application/json", TOKEN_HEADER: server.token}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        given |= {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, None if value is None else json.dumps(value), given)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def events(server: Dashboard) -> list[dict[str, Any]]:
    """The values of a stream of events, until all runs are loaded."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", f"/events?token={server.token}")
    found, answer = list[dict[str, Any]](), connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    while not (found and found[-1].get("loaded")):
        line = answer.readline()
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    connection.close()
    return found


def rows(server: Dashboard) -> dict[str, dict[str, Any]]:
    first, *others = events(server)
    assert first["folder"] == str(server.index.folder)
    return {row["name"]: row for event in others for row in event["rows"]}


def test_the_page_and_all_that_it_names_are_sent(server: Dashboard) -> None:
    status, headers, page = request(server, "GET", "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert server.token.encode() in page
    assert "'unsafe" not in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    named = {name for name in ASSETS if f'"/{name}"'.encode() in page}
    scripts = [request(server, "GET", f"/{name}")[2] for name in ASSETS if name.endswith(".js")]
    imported = {name for name in ASSETS if any(f'from "./{name}"'.encode() in script for script in scripts)}
    assert named | imported == {*ASSETS}
    for name, (_, kind) in ASSETS.items():
        status, headers, _ = request(server, "GET", f"/{name}")
        assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"style=" not in page
    assert not any(b"innerHTML" in request(server, "GET", f"/{name}")[2] for name in ASSETS if "uPlot" not in name)


def test_every_run_is_listed(server: Dashboard) -> None:
    found = rows(server)
    assert sorted(found) == sorted(["a", "b", "damaged", HOSTILE.replace("/", "_")])
    assert {row["status"] for row in found.values()} == {"finished"}


def test_curves_of_runs_that_differ_by_seed_are_a_group(server: Dashboard) -> None:
    ids = {name: row["id"] for name, row in rows(server).items()}
    wanted = [ids["a"], ids["b"], ids[HOSTILE.replace("/", "_")], "no such id", None]
    status, _, content = request(server, "POST", "/curves", {"runs": wanted})
    found = json.loads(content)
    assert status == 200
    assert [(run["id"], run["group"], run["seed"]) for run in found["runs"]] == [
        (wanted[0], "A", 1), (wanted[1], "A", 2), (wanted[2], None, 3),
    ]  # fmt: skip
    assert found["runs"][0]["val"]["bpb"] == [*CURVE]


def test_curves_of_a_damaged_run_are_one_line(server: Dashboard) -> None:
    ids = {name: row["id"] for name, row in rows(server).items()}
    found = json.loads(request(server, "POST", "/curves", {"runs": [ids["damaged"], ids["a"]]})[2])
    assert [run["name"] for run in found["runs"]] == ["a"]
    assert "metrics.jsonl is damaged" in found["problems"][ids["damaged"]]
    status, _, content = request(server, "POST", "/run", {"run": ids["damaged"]})
    assert (status, "is damaged" in json.loads(content)["error"]) == (400, True)


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/runs/a/config.json", "/a/config.json", "/link", "//etc/passwd",
     "/dash.js/../dash.html", "/dash.html", "/assets/dash.js", "/dash.js%00", "/prompt", "//[", "/events/"],
)  # fmt: skip
def test_no_other_file_is_sent(server: Dashboard, path: str) -> None:
    status, _, content = request(server, "GET", path)
    assert (status, json.loads(content)) == (404, {"error": "Not Found"})


@pytest.mark.parametrize("path", ["/", "/dash.js", "/events", "/curves", "/run", "/prompt"])
def test_other_sites_are_refused_everywhere(server: Dashboard, path: str) -> None:
    method = "POST" if path in ("/curves", "/run", "/prompt") else "GET"
    assert request(server, method, path, {}, Host="evil.example:8327")[0] == 421
    assert request(server, method, path, {}, Origin="http://evil.example")[0] == 403
    assert request(server, method, path, {}, Sec_Fetch_Site="cross-site")[0] == 403
    if method == "POST":
        assert request(server, method, path, {}, X_Gptlab_Token="wrong")[0] == 403
    assert request(server, "PUT", path, {})[0] in (405, 501)


@pytest.mark.parametrize("path", ["/curves", "/run", "/prompt"])
@pytest.mark.parametrize(
    "value",
    [[], 3, {"run": "../../secret"}, {"runs": "x"}, {"runs": ["x"] * 1000}, {"run": {"a": 1}, "runs": {}}],
)
def test_malformed_questions_are_one_line(server: Dashboard, path: str, value: object) -> None:
    status, _, content = request(server, "POST", path, value)
    if path == "/curves" and value == {"runs": ["x"] * 1000}:
        assert b"at most" in content
    assert status == 400
    assert set(json.loads(content)) == {"error"}


def test_large_and_odd_requests_are_refused(server: Dashboard) -> None:
    assert request(server, "POST", "/run", {"run": "x" * 70_000})[0] == 413
    assert request(server, "GET", f"/{'x' * 70_000}")[0] == 414
    assert request(server, "GET", "/", X_Long="x" * 70_000)[0] == 431
    for text in (b"\r\n\r\n", b"GARBAGE\r\n\r\n", b"POST /run HTTP/1.1\r\nContent-Length: 5\r\n\r\n", b"\x00" * 100):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as sender:
            sender.sendall(text)
            sender.shutdown(socket.SHUT_WR)
            assert b"200 OK" not in sender.recv(1 << 16)
    assert request(server, "GET", "/")[0] == 200


def test_it_listens_on_loopback_only(server: Dashboard) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UserError, match=f"port {server.server_port}: .*; choose another --port"):
        Dashboard(server.index.folder, server.server_port)


def test_the_server_imports_no_torch() -> None:
    program = "import sys, gptlab.cli.dash, gptlab.report.dashboard.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
