"""The layers that model families are built of."""
