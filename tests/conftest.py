"""What tests of several folders use. This folder is on the path by it: `mpi_jobs` can be imported."""
