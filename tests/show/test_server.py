import json
import re
from http.client import HTTPConnection

import pytest

from opteq.data.finding import SUFFIXES
from opteq.errors import ConfigError
from opteq.show.server import ShowServer


@pytest.fixture
def ask(server):
    """Sends a request; gives status, headers and content."""

    def ask(path, method="GET", body=None, headers=None):
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        kind = response.headers["Content-Type"]
        return response.status, response.headers, json.loads(content) if "json" in kind else content

    return ask


def test_the_page_needs_nothing_from_elsewhere(ask):
    for path in ("/", "/style.css", "/script.js"):
        status, headers, content = ask(path)
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'self'")
        # The name of SVG is no address.
        assert b"://" not in content.replace(b"http://www.w3.org/2000/svg", b"")


def test_the_page_offers_to_open_what_folders_are_searched_for(ask):
    _, _, page = ask("/")
    (offered,) = re.findall(r'accept="(.*?)"', page.decode())
    assert set(offered.split(",")) == set(SUFFIXES)


def test_it_answers_this_machine_alone(server, ask):
    assert server.server_address[0] == "127.0.0.1"
    status, _, content = ask("/api/network", headers={"Host": "elsewhere.example"})
    assert status == 403
    assert content["error"].startswith("Open this page as http://127.0.0.1:")
    assert ask("/api/network", headers={"Host": f"localhost:{server.server_port}"})[0] == 200


def test_nothing_is_done_for_a_browser_that_has_gone(server, ask, monkeypatch):
    asked = []
    monkeypatch.setattr(server.viewer, "certificate", lambda key, settings, statement: asked.append(key))
    with server.certificate_lock:
        for key in ("left", "stayed"):
            connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", f"/api/certificate?image={key}")
            if key == "left":
                connection.close()
    assert connection.getresponse().status == 200
    assert ask("/api/network")[0] == 200
    assert asked == ["stayed"]


def test_a_certificate_keeps_nothing_else_waiting(server, ask, monkeypatch):
    monkeypatch.setattr(server.viewer, "certificate", lambda key, settings, statement: "certain")
    with server.certificate_lock:
        assert ask("/api/equilibrium?image=test-0")[0] == 200
        assert ask("/api/attack?image=test-0&epsilon=0.03")[0] == 200
    with server.lock:
        assert ask("/api/certificate?image=test-0")[2] == "certain"


def test_the_settings_of_a_query_are_in_force(ask):
    trained = ask("/api/equilibrium?image=test-0")[2]
    other = ask("/api/equilibrium?image=test-0&regulariser=squared%20norm&strength=0.5")[2]
    assert trained["shares"][-1] != other["shares"][-1]


def test_what_is_looked_at(ask):
    assert len(ask("/api/network")[2]["images"]) == 3
    assert "‖z - z*‖" in ask("/api/certificate?image=test-1&statement=Distance%20to%20the%20optimum")[2]
    assert "picture" in ask("/api/attention?image=test-1")[2]
    assert "changed" in ask("/api/attack?image=test-1&epsilon=0.03")[2]


def test_an_image_comes_in(ask, png):
    status, _, entry = ask("/api/images", "POST", png[0], {"X-File-Name": "a%20b.png"})
    assert (status, entry["name"]) == (200, "a b.png")
    assert ask(f"/api/equilibrium?image={entry['key']}")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (("/api/nothing",), 404, "nothing at /api/nothing"),
        (("/elsewhere",), 404, "nothing at /elsewhere"),
        (("/api/equilibrium?image=test-7",), 400, "not here any more"),
        (("/api/equilibrium?image=test-0&strength=much",), 400, "`strength` to be a number"),
        (("/api/equilibrium?image=test-0&strength=nan",), 400, "`strength` to be a number"),
        (("/api/attack?image=test-0&epsilon=-1",), 400, "epsilon"),
        (("/api/certificate?image=test-0&statement=all",), 400, "no statement 'all'"),
        (("/api/images", "POST", b"no image"), 400, "not an image"),
        (("/api/other", "POST", b""), 404, "nothing at /api/other"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(ask, request_, status, words):
    got, _, content = ask(*request_)
    assert got == status
    assert words in content["error"]


def test_a_failure_of_its_own_is_shown_in_the_terminal(server, ask, capsys, monkeypatch):
    monkeypatch.setattr(server.viewer, "describe", lambda: 1 / 0)
    status, _, content = ask("/api/network")
    assert (status, content) == (500, {"error": "The terminal shows why this failed."})
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_port_that_is_taken(server, viewer):
    with pytest.raises(ConfigError, match=f"Port {server.server_port} cannot be used .* --port"):
        ShowServer(viewer, server.server_port)
    with pytest.raises(ConfigError, match="Port 70000 cannot be used"):
        ShowServer(viewer, 70000)
