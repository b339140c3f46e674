"""The functions of process-group mode that users call. Each one resolves its group and calls the group's method."""
