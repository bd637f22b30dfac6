"""``python -m marft_agents_classic``: which classic AutoGen is installed, or what is wrong."""

from __future__ import annotations

import sys

from marft_agents.recording import IntegrationError
from marft_agents_classic.packages import runtime

try:
    print(runtime())
except IntegrationError as error:
    sys.exit(str(error))
