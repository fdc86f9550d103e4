"""Tool calls in chats: what a client offers, how the model is told and held to it, and how its calls are read."""
