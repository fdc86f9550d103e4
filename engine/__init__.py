"""The engine: scheduler, KV cache, model runner and sampling of one rank. Importing this package imports no torch."""

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported
