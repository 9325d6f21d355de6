"""The server: four addresses, plain starlette, carried by uvicorn."""

from __future__ import annotations

import errno
import json
import socket
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from importlib.resources import files
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from tokenv.config.conversion import from_dict
from tokenv.core.errors import UserError
from tokenv.library.handlers import LONGEST, SegmentRequest, answer, page
from tokenv.library.model_cache import ModelCache

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL = ("127.0.0.1", "localhost", "[::1]")
LARGEST = 8 * LONGEST  # bytes of a question: JSON may write a byte as \u0000
WAITING = 16  # requests that wait for the models
GRACE = 1  # seconds that requests have to end in when the server is stopped
DISCONNECTED = 499  # status of a request whose client is gone, as nginx has it; nobody reads it
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


def host_names(host: str, address: str) -> tuple[str, ...]:
    """Return the host names that requests may name, as ``TrustedHostMiddleware`` takes them.

    On a loopback address these are the machine's own: a page elsewhere could let its name lead there (DNS rebinding).
    On any other address they are all, ``*``: whoever reaches the machine is let in.

    Args:
        host: that the user asked to listen on.
        address: numeric, that the socket listens on.
    """
    numeric = ip_address(address)
    if not (getattr(numeric, "ipv4_mapped", None) or numeric).is_loopback:
        return ("*",)
    return (*LOCAL, in_url(host), in_url(address))


def in_url(host: str) -> str:
    """Return a host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def application(shelf: ModelCache, *, seed: int = 0, names: Sequence[str] = LOCAL) -> Starlette:
    """Build the ASGI application: the page, its script, ``/runs`` (GET: all runs) and ``/spans`` (POST: cut a text).

    The models answer one request at a time, and ``WAITING`` further requests wait; any more get status 503. A request
    whose client has disconnected is cancelled. Errors are JSON, ``{"error": message}``.

    Args:
        shelf: of runs.
        seed: of drawn boundaries.
        names: host names that requests may name; see ``host_names``.
    """
    from anyio import CapacityLimiter, from_thread
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    limiter = CapacityLimiter(1)

    async def computed(request: Request, work: Callable[[], dict[str, Any]]) -> Response:
        if limiter.statistics().tasks_waiting >= WAITING:
            return _failure(f"{WAITING} requests are waiting already: try again in some seconds", 503)
        found = await _unless_disconnected(request, work, limiter)
        return Response(status_code=DISCONNECTED) if found is None else JSONResponse(found, headers=HEADERS)

    async def home(_: Request) -> Response:
        return HTMLResponse(page(shelf, seed), headers=HEADERS)

    async def script(_: Request) -> Response:
        text = files("tokenv").joinpath("library/page.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript", headers=HEADERS)

    async def runs(request: Request) -> Response:
        return await computed(request, lambda: {"seed": seed, "runs": shelf.as_list()})

    async def spans(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return _failure(f"origin = {origin!r}: expected requests of this page only", 403)
        try:
            asked = from_dict(SegmentRequest, await _body(request))
        except UserError as error:
            return _failure(str(error), 400)
        return await computed(request, lambda: answer(shelf, asked, seed, check=from_thread.check_cancelled))

    routes = [
        Route("/", home),
        Route("/page.js", script),
        Route("/runs", _ending(runs)),
        Route("/spans", _ending(spans), methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(names))])


def _failure(message: str, status: int) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": message}, status, HEADERS)


def _ending(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint, answering also requests that end early: uvicorn logs no traceback of them."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=DISCONNECTED)
        except CancelledError:
            return _failure("the server was stopped", 503)

    return wrapped


async def _unless_disconnected(
    request: Request, work: Callable[[], dict[str, Any]], limiter: CapacityLimiter
) -> dict[str, Any] | None:
    """Return the result of ``work``, done in a thread; None where the client disconnected before it began or ended."""
    from anyio import create_task_group, to_thread

    found = None
    async with create_task_group() as tasks:

        async def cancel_when_disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_when_disconnected)
        found = await to_thread.run_sync(work, limiter=limiter)
        tasks.cancel_scope.cancel()
    return found


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
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("the JSON holds a lone surrogate, such as \\ud800: expected Unicode text") from None
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
    """Answer until SIGINT (Ctrl-C) or SIGTERM; requests that take longer than ``GRACE`` are cancelled."""
    import uvicorn

    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=GRACE, **options))
    server.run(sockets=[listening])
