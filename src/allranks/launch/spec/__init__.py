"""A job as data: the requested options, the target of the ranks, and the messages about them. No code here acts."""
