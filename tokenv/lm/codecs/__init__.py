"""What the U-Net reads and predicts."""

CODECS = {"bytes": "tokenv.lm.codecs.base:ByteCodec", "series": "tokenv.lm.codecs.series:SeriesCodec"}  # by name
