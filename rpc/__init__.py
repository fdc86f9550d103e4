"""What every server shares: errors, channels, scaffolding, deadlines, stages, metrics, logs, settings."""

import os

# gRPC's native library writes to stderr in a form of its own, amid the JSON lines. What it has to say also
# comes as a status, which is logged. It reads the variable when it is first used, so it has to be set before
# that.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
