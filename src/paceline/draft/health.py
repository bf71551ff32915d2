"""What a drafter does with a law that it can't draw from."""

from __future__ import annotations

import logging

from paceline.core.law import Law
from paceline.sampling.law import BrokenLaw, EmptyLaw

log = logging.getLogger(__name__)


class DraftHealth:
    """Drafts end where the law is unusable, which biases nothing: the law depends on the
    tokens before it alone. Bad logits are said once, since they mean a broken draft."""

    def __init__(self) -> None:
        self._warned = False

    def usable(self, law: Law) -> bool:
        if isinstance(law, BrokenLaw) and not self._warned:
            log.warning("the draft model gave NaN or infinite logits; such drafts end there")
            self._warned = True
        return not isinstance(law, BrokenLaw | EmptyLaw)
