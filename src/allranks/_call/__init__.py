"""The parts of a call that are common to all engines: its operation, its ``Work``, its call site in the program."""
