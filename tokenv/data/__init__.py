"""Where sequences come from: text corpora, the built-in corpora, and how they are cut."""
