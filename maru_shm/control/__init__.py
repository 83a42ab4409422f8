"""The control plane: who may read and write which bytes of the pool, and how they ask.

    messages, plane, errors   what is said: plain values, the interface, what can go wrong
    wire                      how it looks as bytes (docs/protocol.md): frames
    request_fields, reply_fields, fields    and what is in them
    service, sessions         the server's mind: index, pool and sessions behind one ``handle``
    server, recovery          the server's body: sockets, time, signals; opening a pool again
    session_lock, pool_lock   proof of life, and one server per pool
    exchange, pending         the client's mind: requests under way, the session, what arrives late
    blocking                  the same, waiting for every answer
    client, embedded          the client's body: a socket; finding or starting a server
    local                     client and service in one process, without sockets
    runtime_dir               where sockets, locks, log and pool lie

``maru_shm.control.client.connect`` is where a user of the store begins.
"""
