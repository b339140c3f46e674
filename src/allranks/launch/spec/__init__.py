"""A job as data: what was asked for, what is run, and the messages that are sent about it. Nothing here acts."""
