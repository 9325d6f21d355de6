"""The command line: ``main`` finds a command's file by its name, ``sacred`` is where Sacred is met."""
