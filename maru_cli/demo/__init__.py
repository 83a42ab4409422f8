"""``maru demo``: two vLLM servers share KV through one pool, compared with plain vLLM."""
