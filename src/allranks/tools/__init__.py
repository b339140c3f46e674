"""Tools behind the command line. Each collects its results into a dataclass, then renders it."""
