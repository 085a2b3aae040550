"""Where everything lies, as frozen values computed without a device."""

from moe_optim.layout.planes import GatherPlane
from moe_optim.layout.shards import Member, MemberRange, ShardPlan, plan_shards

__all__ = ["GatherPlane", "Member", "MemberRange", "ShardPlan", "plan_shards"]
