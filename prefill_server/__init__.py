"""Front process of a prefill server."""
