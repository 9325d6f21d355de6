"""``tokenv serve``: a page on this machine that cuts a text as one types it, by one run or several."""

from __future__ import annotations

import sys
from functools import partial

from tokenv.cli.options import ServeOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.library.model_cache import ModelCache
from tokenv.library.server import application, check_installed, host_names, in_url, listen, serve
from tokenv.plotting.console import console


def serve_page(options: ServeOptions, _record: Record) -> None:
    """Serve until Ctrl-C."""
    check_installed()
    with listen(options.host, options.port) as listening:
        shelf = ModelCache([options.run, *options.other_runs], options.checkpoint)
        for config in shelf.configs.values():
            check_text(config)
        numeric, port, *_ = listening.getsockname()
        app = application(shelf, seed=options.seed, names=host_names(options.host, numeric))
        address = f"http://{in_url(options.host)}:{port}/"
        console().print(f"{', '.join(shelf.chosen)} at {address} (Ctrl-C ends)", soft_wrap=True)
        sys.stdout.flush()
        serve(app, listening)


COMMAND = Command("serve", partial(resolve_options, ServeOptions), serve_page, ServeOptions)
run = COMMAND.run
