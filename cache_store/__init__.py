"""KV transfer between servers: leases, ledger, layout, transfer service and client."""
