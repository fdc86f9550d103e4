"""What every server shares: errors, channels, scaffolding, deadlines, stages, metrics, logs, settings."""

import os

# gRPC's native library writes to stderr in a form of its own, amid the JSON lines. What it has to say also
# comes as a status, which is logged. It reads the variable when it is first used, so it has to be set before
# that.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Processes start programs and never fork to go on themselves. gRPC's fork handlers would start its threads in the child
# too, where one of them crashes now and then before the program is there. It reads this when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
