"""The transport nixl: an agent in a process of its own, and one-sided reads through it. Optional."""
