"""Malformed HTTP requests to the application of ``tokenv serve``: what a seed makes, and what the server answers."""

import asyncio
import functools
import json
from pathlib import Path

import pytest
from asgi import request
from malformed import NASTY, RUN, mutated

KEYS = ["text", "checkpoints", "rate", "threshold", "other", "\ud800"]
VALUES = [
    None,
    True,
    0,
    -1,
    0.3,
    1.0,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    [],
    {},
    [1],
    {"a": "b"},
    {RUN: 1},
]
VALUES += [
    {RUN: "../.."},
    {RUN: "\ud800"},
    "\udfff",
    "\udc80",
    "\x00",
    "a" * 10_001,
    "שלום\u202e",
    "some text",
]
HOSTS = [
    "127.0.0.1:8123",
    "localhost",
    "[::1]:8123",
    "[",
    "",
    "evil.example",
    "127.0.0.1:8123:1",
    "127.0.0.1@evil",
    "\xff",
]
ORIGINS = [
    "http://127.0.0.1:8123",
    "http://[",
    "null",
    "",
    "http://evil.example",
    "//",
    "http://[::1",
    "\xff",
    "\x00",
]


def http_request(generator):
    """Make the arguments of ``asgi.request``: path, body and headers."""
    values = {
        generator.choice(KEYS): generator.choice([*VALUES, *NASTY])
        for _ in range(generator.randint(0, 4))
    }
    body = json.dumps(
        generator.choice(
            [
                values,
                values | {"text": "some text"},
                values | {"text": "a"},
                generator.choice(VALUES),
            ]
        )
    )
    if generator.random() < 0.2:
        body = mutated(body, generator)
    data = (
        body.encode("utf-8", "surrogatepass")
        if generator.random() < 0.9
        else generator.randbytes(generator.randint(0, 200))
    )
    headers = {"host": generator.choice(HOSTS)} if generator.random() < 0.2 else {}
    headers |= {"origin": generator.choice(ORIGINS)} if generator.random() < 0.3 else {}
    path = generator.choice(
        ["/spans"] * 9 + ["/", "/runs", "/page.js", "/../run", "/spans/", "/%00", "//"]
    )
    return path, data if generator.random() < 0.9 else None, headers


def http_outcome(made):
    """``ok``, ``message``, or what went wrong: an exception, a status of the server's own fault, several lines."""
    path, body, headers = made
    try:
        status, _, text = asyncio.run(
            request(_build_application(Path.cwd()), path, body, **headers)
        )
    except Exception as error:
        return f"traceback: {type(error).__name__}: {str(error)[:200]}"
    if status in (200, 307):
        return "ok"
    if not 400 <= status < 500:
        return f"status {status}: {text[:200]!r}"
    message = json.loads(text)["error"] if text.startswith("{") else text
    return (
        "message"
        if message and len(message.splitlines()) == 1
        else f"status {status}: {text[:200]!r}"
    )


@functools.cache
def _build_application(place):
    pytest.importorskip("starlette")
    from tokenv.library.handlers import ModelCache
    from tokenv.library.server import build_application

    return build_application(ModelCache([RUN], "latest"))
