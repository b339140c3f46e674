"""Master-worker mode: one process drives all others, as one drives a GPU."""
