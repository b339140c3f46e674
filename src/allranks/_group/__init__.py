"""The process group: checks a call once, selects the engine by the device of its tensors, and numbers the call."""
