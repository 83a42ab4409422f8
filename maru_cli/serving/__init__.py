"""Real vLLM API servers for ``maru demo`` and ``maru bench serve``: start, ask, measure, stop."""
