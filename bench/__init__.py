"""Load generator, micro-benchmarks and side-by-side comparisons."""
