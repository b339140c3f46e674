"""What tests of several folders use. This folder is on the path by it: `mpi_jobs` can be imported."""

import os
import sys

# The tests start thousands of interpreters. Each would compile all that it imports of allranks, 0.6 s of a core, where
# a container's image forbids that the result is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
