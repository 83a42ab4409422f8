"""The index of a pool: a pure data structure of segments, objects, leases and eviction.

``index.Index`` is the whole interface; ``effects`` and ``found`` are what it exchanges with the
service that owns the pool's bytes, ``answers`` what it returns.
"""
