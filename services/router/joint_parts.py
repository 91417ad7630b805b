"""All that the processes of one router keep together, in the order in which it lies in their memory."""

from __future__ import annotations

from .joint_bound import JointBound
from .joint_drains import JointDrains
from .joint_memory import JointMemory
from .joint_places import JointPlaces
from .joint_prefixes import JointPrefixes
from .joint_tenants import JointTenants


class JointParts:
    """For one event loop."""

    def __init__(self, memory: JointMemory, *, running_max: int, queue_max: int) -> None:
        self.tenants = JointTenants(memory)
        self.prefixes = JointPrefixes(memory)
        self.bound = JointBound(memory, running_max=running_max, queue_max=queue_max)
        self.drains = JointDrains(memory)
        self.places = JointPlaces(memory)
