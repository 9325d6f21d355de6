"""The server: responses, rejected requests, and errors at the start."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from asgi import request
from pages import Page

import tokenv
from tokenv.cli.main import run_command
from tokenv.core.errors import UserError
from tokenv.library.handlers import MAX_BYTES, ModelCache
from tokenv.library.server import (
    LOCAL,
    MAX_BODY,
    MAX_WAITING,
    build_application,
    host_names,
    in_url,
    listen,
)

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def ask(
    app: Any, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Send a request and wait for its answer."""
    return asyncio.run(request(app, path, body, **headers))


@pytest.fixture
def app(served_run: Path) -> Any:
    return build_application(ModelCache([str(served_run)], "latest"), seed=3)


def test_the_page_its_script_and_what_there_is(app: Any, served_run: Path) -> None:
    status, headers, text = ask(app, "/")
    assert status == 200
    assert "script-src 'self'" in headers["content-security-policy"]
    assert Page(text).headings[-1] == "Token boundaries as you type"
    status, headers, text = ask(app, "/page.js")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/javascript")
    status, _, text = ask(app, "/runs")
    assert status == 200
    assert json.loads(text)["runs"][0]["run"] == str(served_run)
    assert ask(app, "/other")[0] == 404
    assert ask(app, "/spans")[0] == 405


def test_a_text_is_answered_as_the_library_does(app: Any, served_run: Path) -> None:
    status, headers, text = ask(app, "/spans", json.dumps({"text": "für <b>alle</b>"}).encode())
    assert (status, headers["content-type"]) == (200, "application/json")
    (answer,) = json.loads(text)["runs"]
    assert (
        answer["spans"]
        == tokenv.load(served_run, checkpoint="latest").spans("für <b>alle</b>", seed=3).as_dict()
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no JSON"),
        (b"[" * 5000, "no JSON"),
        (b"[]", "a JSON mapping with a text"),
        (b'{"rate": 0.1}', "a JSON mapping with a text"),
        (b'{"text": ""}', "the text is empty"),
        (b'{"text": "' + b"a" * (MAX_BYTES + 1) + b'"}', "expected at most 10,000"),
        (b'{"text": "' + b"a" * MAX_BODY + b'"}', "the text is too long"),
        (rb'{"text": "\ud800"}', "a lone surrogate"),
        (rb'{"text": "a", "checkpoints": {"run": "\udfff"}}', "a lone surrogate"),
        (rb'{"text": "a", "\ud800": 1}', "a lone surrogate"),
    ],
)
def test_bad_requests_are_reported(app: Any, body: bytes, message: str) -> None:
    status, _, text = ask(app, "/spans", body)
    assert status == 400
    assert message in json.loads(text)["error"]


def test_other_names_and_other_pages_are_refused(app: Any, served_run: Path) -> None:
    body = b'{"text": "ab"}'
    assert ask(app, "/", host="evil.example")[0] == 400
    assert ask(app, "/spans", body, origin="http://evil.example")[0] == 403
    assert ask(app, "/spans", body, host="localhost:1", origin="http://localhost:1")[0] == 200
    everywhere = build_application(
        ModelCache([str(served_run)], "latest"), names=host_names("0.0.0.0", "0.0.0.0")
    )
    assert ask(everywhere, "/", host="machine.example")[0] == 200
    assert (
        ask(everywhere, "/spans", body, host="machine.example", origin="http://evil.example")[0]
        == 403
    )


@pytest.mark.parametrize(
    "origin", ["http://[", "", "null", "http://", "//[::1", "\xff://\xff", "127.0.0.1:8123"]
)
def test_an_origin_that_is_no_url_is_refused(app: Any, origin: str) -> None:
    status, _, text = ask(app, "/spans", b'{"text": "ab"}', origin=origin)
    assert status == 403
    assert "expected requests of this page only" in json.loads(text)["error"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "127.1", "localhost", "::1", "0.0.0.0"])
def test_every_loopback_address_checks_the_host(host: str, served_run: Path) -> None:
    try:
        listening = listen(host, 0)
    except UserError:
        pytest.skip(f"this machine does not listen on {host}")
    with listening:
        names = host_names(host, listening.getsockname()[0])
    app = build_application(ModelCache([str(served_run)], "latest"), names=names)
    for own in (in_url(host), "127.0.0.1", "localhost", "[::1]"):
        assert ask(app, "/", host=f"{own}:8123")[0] == 200
    assert ask(app, "/", host="evil.example")[0] == (200 if host == "0.0.0.0" else 400)


def test_host_names_of_a_mapped_address() -> None:
    assert host_names("::ffff:127.0.0.1", "::ffff:127.0.0.1") == (
        *LOCAL,
        *["[::ffff:127.0.0.1]"] * 2,
    )


def test_few_requests_wait_and_those_of_gone_clients_are_cancelled(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    release = threading.Event()
    answered: list[str] = []

    def slow(_: Any, segment_request: Any, *__: Any, **___: Any) -> dict[str, Any]:
        answered.append(segment_request.text)
        started.set()
        assert release.wait(60)
        return {}

    monkeypatch.setattr("tokenv.library.server.segment_text", slow)

    async def many() -> None:
        gone = asyncio.Event()
        bodies = [json.dumps({"text": str(number)}).encode() for number in range(MAX_WAITING + 1)]
        running = asyncio.create_task(request(app, "/spans", bodies[0]))
        while not started.is_set():
            await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(request(app, "/spans", body, gone=gone)) for body in bodies[1:]
        ]
        await asyncio.sleep(0.01)
        status, _, text = await request(app, "/spans", b'{"text": "one more"}')
        assert status == 503
        assert f"{MAX_WAITING} requests are waiting" in json.loads(text)["error"]
        gone.set()
        await asyncio.gather(*waiting)  # none of them was answered
        release.set()
        assert (await running)[0] == 200
        assert (await request(app, "/spans", b'{"text": "last"}'))[0] == 200

    asyncio.run(many())
    assert answered == ["0", "last"]


def test_a_client_that_goes_stops_before_the_next_run(served_run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(served_run)
    model_cache = ModelCache([str(served_run), str(tmp_path / "other")], "latest")
    began: list[str] = []

    async def leave() -> None:
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        model = model_cache.model

        def watched(run: str, name: str | None = None) -> Any:
            began.append(run)
            loop.call_soon_threadsafe(gone.set)
            time.sleep(0.1)  # so that the server hears of it
            return model(run, name)

        model_cache.model = watched  # type: ignore[method-assign]
        await request(build_application(model_cache), "/spans", b'{"text": "ab"}', gone=gone)

    asyncio.run(leave())
    assert began == [str(served_run)]


def test_where_it_cannot_listen() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port = {port}: in use at 127.0.0.1"):
            listen("127.0.0.1", port)
    for host in ("192.0.2.1", "no.such.host.invalid", "a\udcffb", "a" * 70):
        with pytest.raises(UserError, match="expected an address of this machine"):
            listen(host, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run={run}/none"], "no complete checkpoint in .*/none"),
        (["run={run}", "port=70000"], "port = 70000: expected 0"),
        (["run={run}", "host="], "host = '': expected an address of this machine"),
        (["run={run}", "other_runs=['{run}']"], "expected other runs than"),
        (["run={run}", "json=a"], "unknown key json"),
        (["run={run}", "port={port}"], "in use"),
    ],
)
def test_one_message_where_it_cannot_start(
    words: list[str], message: str, served_run: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [word.format(run=served_run, port=taken.getsockname()[1]) for word in words]
        with pytest.raises(UserError, match=message):
            run_command("serve", ["with", *filled])


def test_a_missing_package_is_named(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match="needs the package uvicorn: pip install starlette uvicorn"):
        run_command("serve", ["with", f"run={served_run}"])


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server process; yield it and its address."""
    command = [sys.executable, "-m", "tokenv", "serve", "with", *words, "port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert address is not None, line + process.communicate()[1]
            yield process, address[0]
        finally:
            process.kill()


@pytest.mark.slow
def test_a_process_serves_until_it_is_stopped(served_run: Path) -> None:
    with served(f"run={served_run}", "checkpoint=latest") as (process, address):
        spans_request = urllib.request.Request(f"{address}spans", b'{"text": "some text"}')
        with urllib.request.urlopen(spans_request, timeout=60) as answered:
            (answer,) = json.load(answered)["runs"]
        assert (
            answer["spans"]
            == tokenv.load(served_run, checkpoint="latest").spans("some text").as_dict()
        )
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 130
        assert printed.splitlines()[-1] == "tokenv: stopped"


@pytest.mark.slow
def test_sigterm_ends_it_while_many_wait(served_run: Path) -> None:
    body = json.dumps({"text": "some text " * 999}).encode()
    question = b"POST /spans HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )
    with (
        served(f"run={served_run}", "checkpoint=latest") as (process, address),
        ExitStack() as clients,
    ):
        port = int(address.rstrip("/").rpartition(":")[2])
        for _ in range(140):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(question)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        _, printed = process.communicate(timeout=60)
        assert time.monotonic() - started < 10
        assert process.returncode == 130
        assert printed.splitlines()[-1] == "tokenv: stopped"
        assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_a_browser_shows_it(served_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(served_run, other)
    for earlier in sorted((other / "checkpoints").glob("step-*"))[:-1]:
        shutil.rmtree(earlier)

    def dom(address: str, **fields: Any) -> str:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--timeout=30000",
        ]
        command = [
            str(BROWSER),
            *flags,
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"{address}#{urlencode(fields)}",
        ]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    with served(f"run={served_run}", f"other_runs=['{other}']", "checkpoint=latest") as (
        _,
        address,
    ):
        model = tokenv.load(served_run, checkpoint="latest")
        document = dom(address, text="some <b>text")
        assert document.count('<div class="text"') == 2
        assert "some &lt;b&gt;text" in re.sub(r"</?(?:span|i)\b[^>]*>", "", document)
        assert f"{model.spans('some <b>text').bits_per_byte:.3f}" in document
        moved = dom(address, text="some text", rate=0.4, checkpoint=0)
        first = tokenv.load(min((served_run / "checkpoints").glob("step-*"))).spans(
            "some text", rate=0.4
        )
        assert f"<dd>{first.rate:.3f}</dd>" in moved
        assert "1,024 bytes of training" in moved
        assert "expected at most 10,000" in dom(address, text="a" * 10_001)
        assert len(re.findall(r'<input type="range"[^>]* hidden=""', document)) == 1
