"""Front process of a decode server."""

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported
