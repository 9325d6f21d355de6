"""Damage to stored files."""

from pathlib import Path


def flip_bit(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
