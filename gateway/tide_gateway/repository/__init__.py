"""All SQL of the gateway's tasks, instances, replicas and slots. The rest of the gateway sees frozen data only."""

from tide_gateway.database import StorageFailed
from tide_gateway.repository.choice import Instance, InstanceState
from tide_gateway.repository.group import write_group
from tide_gateway.repository.images import ImageRows
from tide_gateway.repository.instances import InstanceRows
from tide_gateway.repository.replicas import Replica, ReplicaRows
from tide_gateway.repository.slots import SlotRows
from tide_gateway.repository.tasks import Conflict, Repository, StoredStart, StoredTurn

__all__ = [
    "Conflict",
    "ImageRows",
    "Instance",
    "InstanceRows",
    "InstanceState",
    "Replica",
    "ReplicaRows",
    "Repository",
    "SlotRows",
    "StorageFailed",
    "StoredStart",
    "StoredTurn",
    "write_group",
]
