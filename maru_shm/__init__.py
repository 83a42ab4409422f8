"""The shared-memory object store: processes put sealed, immutable objects into one pool of memory
and read each other's in place.

    types      keys, extents, sizes: the words that all parts share
    pool       the bytes: media, on-media format, mapping, checked reads
    index      the pure data structure: segments, objects, leases, eviction
    control    the server that owns the index, and its clients

A client asks the server where an object lies (``control``), and reads or writes the bytes itself
(``pool``). Needs neither torch nor vLLM. Import what you need from the parts; this package itself
imports nothing, so that a server process starts quickly.
"""
