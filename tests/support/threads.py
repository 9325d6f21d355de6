"""Threads of tokenv."""

import threading


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokenv reads ahead"]
