"""The functions of process-group mode, as users call them: each resolves its group and calls it."""
