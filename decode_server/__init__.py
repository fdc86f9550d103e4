"""Front process of a decode server."""
