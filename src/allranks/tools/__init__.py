"""The tools behind the command line: each collects into a dataclass, then renders it."""
