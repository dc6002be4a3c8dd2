"""Lower fused ops back to their references, where no kernel serves them.

Before: rms_norm        After: pow -> mean -> add eps -> rsqrt -> mul -> mul weight
Why: on a CPU a fused op has no kernel of its own, and would only keep Inductor from fusing what it
is made of with its neighbours in C++. What the other passes matched is counted by then.
"""

from __future__ import annotations

from tokenspeed.kernels.tables import OPS
from tokenspeed.passes.rewrite import Inline

PASS = Inline(name="inline", references={each: op.reference for each, op in OPS.items()})
