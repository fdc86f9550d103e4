"""Batches, their inputs on the device, and the step that runs them. The package itself imports no torch."""
