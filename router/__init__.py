"""The router: OpenAI HTTP API, gRPC Generation service, choice of servers, fail-over. Never imports torch."""

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported
