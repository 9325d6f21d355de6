"""Requests to an ASGI application, in process."""

import asyncio
from typing import Any


async def request(
    app: Any,
    path: str,
    body: bytes | None = None,
    *,
    gone: asyncio.Event | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of a response; with a body it is a POST; ``gone`` disconnects the client."""
    named = {"host": "127.0.0.1:8123"} | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET" if body is None else "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8123),
    }
    received: list[dict[str, Any]] = [
        {"type": "http.request", "body": body or b"", "more_body": False}
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    received_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return (
        sent[0]["status"],
        received_headers,
        b"".join(part.get("body", b"") for part in sent[1:]).decode(),
    )
