"""The review of a transform as a program: a list that is checked, a baseline, a search for what is wrong, a note."""

from graft.workbench.check.all_models import check_all
from graft.workbench.check.baseline import Change
from graft.workbench.check.bisect import Bisection
from graft.workbench.check.checklist import check
from graft.workbench.check.line import Line
from graft.workbench.check.request import Request
from graft.workbench.check.results import CheckReport, TransformCheck

__all__ = ["Bisection", "Change", "CheckReport", "Line", "Request", "TransformCheck", "check", "check_all"]
