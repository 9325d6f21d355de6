"""Texts: built in, made up, local files."""
