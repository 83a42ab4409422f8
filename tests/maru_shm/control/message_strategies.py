"""Random messages of every kind."""

from __future__ import annotations

from hypothesis import strategies as st

from maru_shm.control import messages as m
from maru_shm.types import (
    Extent,
    Generation,
    Key,
    LeaseId,
    Namespace,
    OwnerToken,
    PartChecksum,
    PoolGeometry,
    SessionId,
)

u63 = st.integers(0, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)
sessions = u63.map(SessionId)
keys = st.binary(min_size=32, max_size=32).map(Key)
namespaces = st.binary(min_size=32, max_size=32).map(Namespace)
generations = st.integers(1, 2**64 - 1).map(Generation)
extents = st.builds(Extent, u64, u64, generations)
seconds = st.floats(0, 1e9)


def tuples(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=5).map(tuple)


checksums = st.builds(PartChecksum, u64, u64)
leases = st.integers(1, 2**63 - 1).map(LeaseId)
pools = st.builds(
    m.PoolInfo,
    text,
    text,
    st.binary(min_size=16, max_size=16),
    st.builds(PoolGeometry, u63, u63, u63, u63),
)
not_granted = st.sampled_from([o for o in m.ReserveOutcome if o is not m.ReserveOutcome.GRANTED])
reserve_results = st.one_of(
    st.builds(m.ReserveResult, st.just(m.ReserveOutcome.GRANTED), extents),
    st.builds(m.ReserveResult, not_granted, st.none()),
)

requests = st.one_of(
    st.builds(m.OpenSession, u63.map(OwnerToken), text, text),
    st.builds(m.CloseSession, sessions),
    st.builds(m.LookupPrefix, sessions, namespaces, tuples(keys)),
    st.builds(m.LookupEach, sessions, namespaces, tuples(keys)),
    st.builds(m.RenewLeases, sessions, tuples(leases)),
    st.builds(m.ReleaseLeases, sessions, tuples(leases)),
    st.builds(
        m.Reserve,
        sessions,
        namespaces,
        tuples(st.builds(m.ReserveItem, keys, st.none() | keys, u63)),
    ),
    st.builds(m.Commit, sessions, tuples(st.builds(m.CommitItem, generations, tuples(checksums)))),
    st.builds(m.Abort, sessions, tuples(generations)),
    st.builds(m.ReportSuspect, sessions, tuples(generations)),
    st.builds(m.Delete, sessions, namespaces, tuples(keys)),
    st.builds(m.GetStats),
    st.builds(m.ListObjects, u63.map(Generation), st.integers(0, 4096)),
)

replies = st.one_of(
    st.builds(m.SessionOpened, sessions, u63, seconds, pools),
    st.builds(m.LeaseGrant, u63, st.none() | leases, tuples(st.none() | extents)),
    st.builds(m.Renewed, u63, tuples(leases)),
    st.builds(m.Reserved, u63, tuples(reserve_results)),
    st.builds(m.Committed, u63, tuples(generations)),
    st.builds(m.Done, u63, u63),
    st.builds(
        m.Stats,
        u63,
        u63,
        seconds,
        pools,
        *([u64] * 15),
        tuples(st.builds(m.ClientStats, sessions, text, u63, u63)),
    ),
    st.builds(
        m.ObjectRows,
        u63,
        tuples(
            st.builds(
                m.ObjectRow,
                namespaces,
                keys,
                st.sampled_from(m.ObjectState),
                extents,
                seconds,
                st.integers(0, 2**32 - 1),
            )
        ),
    ),
    st.builds(m.Refused, u63, st.sampled_from(m.ErrorCode), text),
)
