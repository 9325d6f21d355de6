"""A comparison as pictures, tables and one page."""
