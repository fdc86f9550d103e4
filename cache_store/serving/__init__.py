"""P's side: leases on staged KV, and what is sent of it to decode servers."""
