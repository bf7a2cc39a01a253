"""What a user may choose about how engines come about."""

from __future__ import annotations

from dataclasses import dataclass

from .engine.interface import check_choice
from .errors import SettingError

POLICIES = ("background", "wait", "never")


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """What a user may choose.

    Attributes:
        policy: a missing engine is built in the ``background`` while the host serves, the call
            ``wait``s for it, or it is ``never`` built.
        after_calls: calls of a shape before its engine is built.
        staging: copy 3x3 convolution weights into the faster layout where memory allows.
        instant: while an engine is missing, serve from the torch UNet in a CUDA graph.
        disk_budget: bytes that all engines may take on disk; 0 is no limit.
        promote_after: calls with the same weights before an engine with them baked in is built
            in the background; 0 is never.
    """

    policy: str = "background"
    after_calls: int = 2
    staging: bool = True
    instant: bool = True
    disk_budget: int = 0
    promote_after: int = 0

    def __post_init__(self) -> None:
        check_choice("policy for missing engines", self.policy, POLICIES)
        if not 1 <= self.after_calls <= 1000:
            raise SettingError("Calls before a build must be from 1 to 1000.")
        if self.disk_budget < 0:
            raise SettingError("The disk budget cannot be negative.", hint="0 is no limit.")
        if self.promote_after < 0:
            raise SettingError("Calls before baking cannot be negative.", hint="0 is never.")
