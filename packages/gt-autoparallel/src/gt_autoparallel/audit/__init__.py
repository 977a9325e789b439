"""An independent second look at plans; see ``plan_audit``."""

from gt_autoparallel.audit.plan_audit import AuditReport, audit_plan, plan_problems

__all__ = ["AuditReport", "audit_plan", "plan_problems"]
