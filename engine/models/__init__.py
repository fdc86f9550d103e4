"""Model families: configuration and forward pass."""
