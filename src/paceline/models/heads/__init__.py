"""Heads that are trained to draft for one target: modules and checkpoint formats.

No engine here. `paceline.draft.eagle` and `paceline.draft.medusa` propose with them,
`paceline.train` trains them.
"""

from paceline.models.heads.config import EagleConfig, MedusaConfig
from paceline.models.heads.eagle import EagleHead
from paceline.models.heads.medusa import MedusaHeads

__all__ = ["EagleConfig", "EagleHead", "MedusaConfig", "MedusaHeads"]
