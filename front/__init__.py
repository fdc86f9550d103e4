"""What the fronts of the prefill and the decode server share: admission, the life of a request, supervision, drain."""

import os

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported

# A front starts its engine as a new program and never forks to go on itself. gRPC's fork handlers only stand in the way
# of that, and complain on stderr. Must be set before grpc is imported for the first time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
