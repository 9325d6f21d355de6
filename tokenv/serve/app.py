"""The server: four addresses, plain starlette, carried by uvicorn."""

from __future__ import annotations

import errno
import json
import socket
import threading
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tokenv.config.convert import make
from tokenv.errors import UserError
from tokenv.serve.answers import LONGEST, Asked, answer, page
from tokenv.serve.shelf import Shelf

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL = ("127.0.0.1", "localhost")
LARGEST = 8 * LONGEST  # bytes of a question: JSON may write a byte as \u0000
HEADERS = {
    # Nothing from elsewhere, no script but the page's own, and in nobody's frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def check_installed() -> None:
    """Refuse where the extra is missing.

    Raises:
        UserError: a package of it is.
    """
    try:
        for package in ("starlette", "uvicorn"):
            import_module(package)
    except ImportError as error:
        raise UserError(
            f"tokenv serve needs the package {error.name}: pip install starlette uvicorn (the extra serve)"
        ) from error


def application(shelf: Shelf, *, seed: int = 0, host: str = LOCAL[0]) -> Starlette:
    """The page, its script, ``/runs`` (GET: what there is) and ``/spans`` (POST: a text, cut); the last two are JSON.

    Args:
        shelf: of runs.
        seed: of drawn boundaries.
        host: address that is listened on. On this machine's own, questions to another name are refused: a page
            elsewhere could let its name lead here.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    one_at_a_time = threading.Lock()

    def refused(message: str, status: int) -> Response:
        return JSONResponse({"error": message}, status, HEADERS)

    def cut(asked: Asked) -> dict[str, Any]:
        with one_at_a_time:
            return answer(shelf, asked, seed)

    def listed() -> dict[str, Any]:
        with one_at_a_time:
            return {"seed": seed, "runs": shelf.as_list()}

    async def home(_: Request) -> Response:
        return HTMLResponse(page(shelf, seed), headers=HEADERS)

    async def script(_: Request) -> Response:
        text = files("tokenv").joinpath("serve/page.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript", headers=HEADERS)

    async def runs(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(listed), headers=HEADERS)

    async def spans(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return refused(f"a page of {origin} asks: expected this one", 403)
        try:
            asked = make(Asked, await _body(request))
        except UserError as error:
            return refused(str(error), 400)
        return JSONResponse(await run_in_threadpool(cut, asked), headers=HEADERS)

    routes = [
        Route("/", home),
        Route("/page.js", script),
        Route("/runs", runs),
        Route("/spans", spans, methods=["POST"]),
    ]
    names = LOCAL if host in LOCAL else ("*",)
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(names))])


async def _body(request: Request) -> dict[str, Any]:
    """A question's JSON mapping.

    Raises:
        UserError: it is none, or too large.
    """
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST:
            raise UserError(
                f"the text is too long: expected at most {LONGEST:,} bytes; tokenv segment takes longer ones"
            )
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"no JSON: {error}") from None
    if not isinstance(values, dict) or "text" not in values:
        raise UserError("expected a JSON mapping with a text")
    return values


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UserError: the port is in use, or the address none of this machine's.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # no name of a host has such characters
        number, said = (error.errno, error.strerror) if isinstance(error, OSError) else (None, error)
        if number == errno.EADDRINUSE:
            message = f"port = {port}: in use at {host}: expected a free one, such as port=0 for any"
        elif number == errno.EACCES:
            message = f"port = {port}: not allowed ({said}): expected one from 1024 on"
        else:
            message = f"host = {host!r}: {said}: expected an address of this machine, such as 127.0.0.1"
        raise UserError(message) from None


def serve(app: Starlette, listening: socket.socket) -> None:
    """Answer until Ctrl-C."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    server.run(sockets=[listening])
