"""Who computes what in the next step. Pure: no sockets, no tensors, the clock is injected."""
