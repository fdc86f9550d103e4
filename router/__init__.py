"""The router: OpenAI HTTP API, gRPC Generation service, choice of servers, fail-over. Never imports torch."""
