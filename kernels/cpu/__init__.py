"""CPU kernels in C for processors with AVX-512 and AMX, each beside its PyTorch reference.

They are optional: `library.load()` builds them with the system's C compiler once per machine and keeps the result, and
returns None where the processor or the compiler is missing; callers then use plain PyTorch.
"""
