"""Before any module with a kernel is imported: without an NVIDIA device, kernels run in Triton's interpreter."""

import os

# Triton reads this when a kernel is decorated, so it cannot wait for the first test that needs it. The device file
# tells as much as PyTorch would, without importing PyTorch into tests that do without.
if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Structured output costs each process of a cluster a second at its start; the tests that need it ask for it.
os.environ.setdefault("BATON_GRAMMAR_BACKEND", "none")
