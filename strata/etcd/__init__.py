"""A thin asynchronous client of etcd: the only user of its API.

`EtcdStore` implements the `Store` protocol; `EtcdStore.cluster` has members, status and alarms. Files by concept:
`endpoint` (one member), `connection` (which member takes a call), `guard` (which answers are accepted), `login`,
`errors`, `codec`, and the services `kv`, `lease`, `watch`, `cluster`, `snapshot`.
"""

from strata.etcd.cluster import Alarm, Cluster, Member, MemberStatus
from strata.etcd.options import Timing, TlsConfig
from strata.etcd.store import EtcdStore

__all__ = ["Alarm", "Cluster", "EtcdStore", "Member", "MemberStatus", "Timing", "TlsConfig"]
