"""Texts: documents of local files and built-in corpora, and BPE tokenizers."""
