"""The command line: ``commands`` lists all commands, and only ``sacred`` and ``observers`` import Sacred."""
