"""Pictures and pages: curves and text coloured by boundary probability."""
