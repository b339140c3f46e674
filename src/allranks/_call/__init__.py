"""What one call is made of, whichever engine runs it: its operation, its ``Work``, its place in the program."""
