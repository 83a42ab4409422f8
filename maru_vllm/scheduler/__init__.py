"""The connector's scheduler half: lookups, leases, loads and stores, without a byte of KV."""
