"""Data: corpora of text and series, how they are split and cut, and the streams of training sequences."""
