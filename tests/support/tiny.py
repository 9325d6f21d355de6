"""Settings of a training run which takes a second."""

from typing import Any

from tokenv.config.files import merge

SETTINGS: dict[str, Any] = {
    "data": {
        "source": "words",
        "seq_len": 32,
        "validation": 0.1,
        "words_documents": 40,
        "lexicon_size": 20,
    },
    "model": {
        "width": 16,
        "heads": 2,
        "down_layers": 1,
        "mid_layers": 1,
        "up_layers": 1,
        "window": 8,
    },
    "agent": {"name": "learned", "window": 2},
    "train": {
        "symbols": 2560,
        "batch_size": 8,
        "warmup_symbols": 512,
    },
    "validation": {"every_symbols": 1024, "sequences": 8, "batch_size": 4},
    "checkpoint": {"every_symbols": 1024, "keep": 10},
    "hardware": {"device": "cpu", "precision": "float32", "compile": "off", "threads": 1},
}


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with other values in some sections."""
    return merge(SETTINGS, sections)


def series_settings(**codec: Any) -> dict[str, Any]:
    """Return the settings on synthetic series; ``codec`` are options of the codec."""
    series = {"context": 4, "count": 6, "length": 300, "dwell": 8}
    data = {
        "kind": "series",
        "source": "regimes",
        "seq_len": 32,
        "validation": 0.2,
        "options": series,
    }
    return settings() | {"data": data, "codec": {"name": "series", **codec}}


def overrides(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Return nested settings as words of a command line."""
    words = []
    for key, value in settings.items():
        if isinstance(value, dict):
            words += overrides(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={value}")
    return words
