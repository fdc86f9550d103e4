"""What the fronts of the prefill and the decode server share: admission, the life of a request, supervision, drain."""

import rpc  # noqa: F401 - says how the gRPC library logs and forks, which that reads when it is first imported
