"""Codecs, which define the symbols of the U-Net."""

CODECS = {"bytes": "tokenv.lm.codecs.base:ByteCodec"}  # by name
