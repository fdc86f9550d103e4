"""Batches, their inputs on the device, and the step that runs them. Importing the package imports no torch."""
