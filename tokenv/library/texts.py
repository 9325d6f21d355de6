"""Texts as they are given to a model: one or several, each str or bytes."""

from __future__ import annotations

from typing import TypeAlias

from tokenv.core.errors import UserError

One: TypeAlias = str | bytes
Several: TypeAlias = list[str] | list[bytes] | list[str | bytes] | tuple[str | bytes, ...]


def as_pairs(text: One | Several, context: One | Several) -> list[tuple[bytes, bytes]]:
    """Context and text of every answer that is asked for.

    Raises:
        UserError: there is not one context for each text.
    """
    texts = text if isinstance(text, list | tuple) else [text]
    contexts = context if isinstance(context, list | tuple) else [context] * len(texts)
    if len(contexts) != len(texts):
        raise UserError(f"context = {len(contexts)} contexts for {len(texts)} texts: expected one, or one for each")
    return [(as_bytes(before), as_bytes(each)) for before, each in zip(contexts, texts, strict=True)]


def as_bytes(text: str | bytes) -> bytes:
    """A text's bytes.

    Raises:
        UserError: it is none, or has none.
    """
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str):
        raise UserError(f"text = {text!r:.80}: expected str or bytes")
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise UserError(f"text = {text[:80]!a}: expected Unicode text, or bytes") from None
