"""A module's forward and backward as a joint graph, and the two graphs that it is cut into."""

from gt_trace.joint.bound_joint import ForwardBackward
from gt_trace.joint.joint_export import export_joint_graph
from gt_trace.joint.joint_graph import JointGraph
from gt_trace.joint.joint_partition import partition

__all__ = ["ForwardBackward", "JointGraph", "export_joint_graph", "partition"]
