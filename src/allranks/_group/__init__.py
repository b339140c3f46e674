"""The process group: checks a call once, picks the engine by the device of its tensors, numbers the call."""
