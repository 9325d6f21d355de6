"""Serve the page and its requests with starlette and uvicorn."""

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

from tokenv.core.conversion import from_dict
from tokenv.core.errors import UserError
from tokenv.library.handlers import MAX_BYTES, ModelCache, SegmentRequest, render_page, segment_text

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL = ("127.0.0.1", "localhost", "[::1]")
MAX_BODY = 8 * MAX_BYTES  # bytes of a request, since JSON may write a byte as \u0000
MAX_WAITING = 16  # requests which may wait for the models
GRACE = 1  # seconds in which requests may finish after the server is stopped
DISCONNECTED = 499  # status of a request whose client has disconnected, as in nginx
HEADERS = {
    # Only the page's own resources and script, and no frame around it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def check_installed() -> None:
    """Raise an error unless the packages of the extra ``serve`` are installed.

    Raises:
        UserError: if one of them is missing.
    """
    try:
        for package in ("starlette", "uvicorn"):
            import_module(package)
    except ImportError as error:
        raise UserError(
            f"tokenv serve needs the package {error.name}: pip install starlette uvicorn (the extra serve)"
        ) from error


def host_names(host: str, address: str) -> tuple[str, ...]:
    """Return the host names which requests may use, for ``TrustedHostMiddleware``.

    On a loopback address these are the machine's own, since a foreign page could resolve its name to that address (DNS
    rebinding). On any other address all names are allowed, ``*``.

    Args:
        host: host from the options.
        address: numeric address of the listening socket.
    """
    numeric = ip_address(address)
    if not (getattr(numeric, "ipv4_mapped", None) or numeric).is_loopback:
        return ("*",)
    return (*LOCAL, in_url(host), in_url(address))


def in_url(host: str) -> str:
    """Return a host in the notation of URLs: an IPv6 address in brackets."""
    if ":" in host:
        return f"[{host}]"
    return host


def build_application(
    models: ModelCache, *, seed: int = 0, names: Sequence[str] = LOCAL
) -> Starlette:
    """Build the ASGI application: the page, its script, ``/runs`` (GET) and ``/spans`` (POST).

    The models process one request at a time, and ``MAX_WAITING`` further requests wait; any more get status 503. A
    request whose client has disconnected is cancelled. Errors are JSON, ``{"error": message}``.

    Args:
        models: runs.
        seed: seed of the sampled boundaries.
        names: host names which requests may use; see ``host_names``.
    """
    from anyio import CapacityLimiter, from_thread
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    limiter = CapacityLimiter(1)

    async def computed(request: Request, work: Callable[[], dict[str, Any]]) -> Response:
        if limiter.statistics().tasks_waiting >= MAX_WAITING:
            return _failure(
                f"{MAX_WAITING} requests are waiting already: try again in some seconds", 503
            )
        result = await _unless_disconnected(request, work, limiter)
        if result is None:
            return Response(status_code=DISCONNECTED)
        return JSONResponse(result, headers=HEADERS)

    async def home(_: Request) -> Response:
        return HTMLResponse(render_page(models, seed), headers=HEADERS)

    async def script(_: Request) -> Response:
        text = files("tokenv").joinpath("library/page.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript", headers=HEADERS)

    async def runs(request: Request) -> Response:
        return await computed(request, lambda: {"seed": seed, "runs": models.as_list()})

    async def spans(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return _failure(f"origin = {origin!r}: expected requests of this page only", 403)
        try:
            wanted = from_dict(SegmentRequest, await _read_body(request))
        except UserError as error:
            return _failure(str(error), 400)
        return await computed(
            request, lambda: segment_text(models, wanted, seed, check=from_thread.check_cancelled)
        )

    routes = [
        Route("/", home),
        Route("/page.js", script),
        Route("/runs", _handle_early_end(runs)),
        Route("/spans", _handle_early_end(spans), methods=["POST"]),
    ]
    return Starlette(
        routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(names))]
    )


def _failure(message: str, status: int) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": message}, status, HEADERS)


def _handle_early_end(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint so that it also answers requests which end early, and uvicorn logs no traceback."""
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
    """Run ``work`` in a thread and return its result; None if the client disconnects before the end."""
    from anyio import create_task_group, to_thread

    result = None
    async with create_task_group() as tasks:

        async def cancel_when_disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_when_disconnected)
        result = await to_thread.run_sync(work, limiter=limiter)
        tasks.cancel_scope.cancel()
    return result


async def _read_body(request: Request) -> dict[str, Any]:
    """Read the JSON mapping of a request.

    Raises:
        UserError: if the body is no such mapping, or too large.
    """
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise UserError(
                f"the text is too long: expected at most {MAX_BYTES:,} bytes; tokenv segment takes longer ones"
            )
    try:
        values = json.loads(data)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            "the JSON holds a lone surrogate, such as \\ud800: expected Unicode text"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"no JSON: {error}") from None
    if not isinstance(values, dict) or "text" not in values:
        raise UserError("expected a JSON mapping with a text")
    return values


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        UserError: if the port is in use or not allowed, or the address does not belong to this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # the latter for invalid characters in a host name
        number = getattr(error, "errno", None)
        reason = getattr(error, "strerror", error)
        if number == errno.EADDRINUSE:
            message = (
                f"port = {port}: in use at {host}: expected a free one, such as port=0 for any"
            )
        elif number == errno.EACCES:
            message = f"port = {port}: not allowed ({reason}): expected one from 1024 on"
        else:
            message = (
                f"host = {host!r}: {reason}: expected an address of this machine, such as 127.0.0.1"
            )
        raise UserError(message) from None


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve until SIGINT (Ctrl-C) or SIGTERM; requests which then take longer than ``GRACE`` are cancelled."""
    import uvicorn

    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=GRACE, **options))
    server.run(sockets=[listening])
