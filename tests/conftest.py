"""What tests of several folders use. This folder is on the path by it: `mpi_jobs` can be imported."""

import os
import sys

from allranks import testing

# The tests start thousands of interpreters. Each would compile all that it imports of allranks, 0.6 s of a core, where
# a container's image forbids that the result is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nearly every rank of a test's imports these: the first for the test's own module, the second in torch.manual_seed and
# in optimizers, 2 s of a core. They are imported once in each fork server.
testing._PRELOADED += ["pytest", "torch._dynamo"]
