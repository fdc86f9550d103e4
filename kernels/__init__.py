"""Kernels, each beside its PyTorch reference. Imports nothing of the project."""
