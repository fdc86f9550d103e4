"""Measurements on an NVIDIA GPU: kernels beside their floors, and whole engine steps."""
