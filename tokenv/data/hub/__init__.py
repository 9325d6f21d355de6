"""Data sets streamed from the Hugging Face hub."""
